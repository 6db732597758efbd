"""Test runs in virtual time with the rollout buffer, staleness controller and scheduler of a run: many
scripts, and kills at each event."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megarl.config.schema import Late, OnUpdate
from megarl.rehearse.simulation.run import Script, SimulatedRun, Simulation, StalledError
from megarl.rollout.driver.rollout_buffer import FailedPromptsError


def script(chance: random.Random, total_steps: int, on_update: OnUpdate | None = None) -> Script:
    """Draw any valid run, with some prompts without signal if such prompts are dropped."""
    size = chance.randint(1, 3)
    k = chance.choice([0, 1, 1, 2, 3])
    num_rows = 6 * size * total_steps
    drops = chance.random() < 0.5
    fails = chance.random() < 0.3
    samples = chance.randint(1, 2) + drops

    return Script(
        lengths=[[chance.randint(1, 60) for _ in range(samples)] for _ in range(num_rows)],
        prompts_per_step=size,
        total_steps=total_steps,
        max_staleness=k,
        on_update=on_update or chance.choice(list(OnUpdate)),
        num_engines=chance.randint(1, 3),
        slots=chance.randint(1, 3),
        token_s=0.05,
        training_s=chance.choice([0.0, 1.0, 5.0]),
        push_s=chance.choice([0.0, 0.5]),
        critic_warmup_steps=chance.choice([0, 0, 2]),
        max_without_signal=1000 if drops else None,
        without_signal=frozenset(row for row in range(num_rows) if chance.random() < 0.3)
        if drops
        else frozenset(),
        failing=frozenset(row for row in range(num_rows) if chance.random() < 0.1) if fails else frozenset(),
        scoring_s=chance.choice([0.0, 0.3]),
        start_s=chance.choice([0.5, 5.0]),
    )


def uids_of(outcome: SimulatedRun) -> list[str]:
    return [uid for step in outcome.steps for uid in step.uids]


def check(one: Script, outcome: SimulatedRun) -> None:
    """Check that every trainable prompt is trained once, in order, with its own samples, and that none is too
    old. At staleness 0, surplus prompts are left out."""
    size = one.prompts_per_step
    wanted = one.prompts_per_step * one.total_steps
    left_out = one.without_signal | one.failing
    rows = [row for row in range(len(one.lengths)) if row not in left_out][:wanted]
    assert [step.number for step in outcome.steps] == list(range(1, one.total_steps + 1))

    if left_out and one.max_staleness == 0:
        rows = [int(uid.partition("-")[2]) for uid in uids_of(outcome)]
        assert len(rows) == wanted
        assert rows == sorted(set(rows) - left_out)
    assert uids_of(outcome) == [f"0-{row}" for row in rows]

    for number, step in enumerate(outcome.steps):
        assert step.lengths == [
            length for row in rows[number * size : (number + 1) * size] for length in one.lengths[row]
        ]
        ages = [step.trained_version - version for version in step.versions]
        assert 0 <= step.age <= max(ages) <= one.max_staleness
        assert step.trained_version == 1 + max(0, number - one.critic_warmup_steps)


def run_with_losses(one: Script, events: set[int]) -> SimulatedRun:
    """Run with an engine dying at each of these events."""

    def lose(number: int) -> None:
        if number in events:
            engines = simulation.engines.groups
            engines[number % len(engines)].die()

    simulation = Simulation(one, on_event=lose)
    return simulation.run()


def test_prompts_are_trained_in_order_once_and_within_the_bound_which_is_reached() -> None:
    """Includes lost engines, dropped and failing prompts, critic warm-up and long weight syncs."""
    chance = random.Random(0)
    oldest = dict.fromkeys(range(4), 0)
    num_lost = num_dropped = num_failing = 0

    for _ in range(300):
        one = script(chance, total_steps=chance.randint(2, 6))
        deaths = {chance.randint(0, 60) for _ in range(chance.choice([0, 0, 1, 5]))}

        outcome = run_with_losses(one, deaths)
        check(one, outcome)
        oldest[one.max_staleness] = max(oldest[one.max_staleness], *(step.age for step in outcome.steps))
        num_lost += outcome.num_restarts
        num_dropped += len(one.without_signal)
        num_failing += len(one.failing)

    assert oldest == {k: k for k in oldest}
    assert num_lost > 100
    assert num_dropped > 100
    assert num_failing > 100


class KilledError(Exception):
    """The driver was killed."""


def run_with_kill(one: Script, at: int, kill_driver: bool) -> tuple[SimulatedRun, bool]:
    """Return the outcome over all processes of the run, and whether the event was reached."""
    killed = False

    def kill(number: int) -> None:
        nonlocal killed
        if number == at:
            killed = True
            if kill_driver:
                raise KilledError
            engines = simulation.engines.groups
            engines[at % len(engines)].die()

    simulation = Simulation(one, on_event=kill)
    try:
        return simulation.run(), killed
    except KilledError:
        saved = simulation.saved
        before = simulation.steps

    after = Simulation(one, saved).run()
    done = saved.step if saved is not None else 0
    return after._replace(steps=[*before[:done], *after.steps]), True


@pytest.mark.parametrize("kill_driver", [False, True], ids=["engine", "driver"])
def test_a_kill_at_any_event_costs_no_prompt_and_no_age(kill_driver: bool) -> None:
    """A killed run with drain continues to the same samples, by the same versions."""
    chance = random.Random(1)
    for _ in range(20):
        one = script(chance, total_steps=3)
        straight = Simulation(one).run()
        at = 0
        comes_so_far = True
        while comes_so_far:
            outcome, comes_so_far = run_with_kill(one, at, kill_driver)
            check(one, outcome)
            if kill_driver and one.on_update is OnUpdate.drain:
                assert [step.versions for step in outcome.steps] == [step.versions for step in straight.steps]
                assert [step.age for step in outcome.steps] == [step.age for step in straight.steps]
            at += 1
        assert at > 5


def test_late_samples_let_others_go_first_and_no_prompt_is_lost_or_comes_twice() -> None:
    """Includes kills of the driver: the resumed run knows what was trained out of order."""
    chance = random.Random(4)
    oldest = 0
    num_out_of_order = 0

    for _ in range(40):
        one = replace(script(chance, total_steps=4, on_update=OnUpdate.continue_), late=Late.mask)
        wanted = one.prompts_per_step * one.total_steps
        for at in (None, 5, 12, 20):
            run = Simulation(one).run() if at is None else run_with_kill(one, at, kill_driver=True)[0]
            rows = [int(uid.partition("-")[2]) for uid in uids_of(run)]
            assert len(set(rows)) == len(rows) == wanted
            assert not set(rows) & (one.without_signal | one.failing)
            if not one.without_signal | one.failing:
                assert sorted(rows) == list(range(wanted))
            for number, step in enumerate(run.steps):
                of_step = rows[number * one.prompts_per_step : (number + 1) * one.prompts_per_step]
                assert of_step == sorted(of_step)
                assert step.lengths == [length for row in of_step for length in one.lengths[row]]
            oldest = max(oldest, *(step.age - one.max_staleness for step in run.steps))
            num_out_of_order += rows != sorted(rows)

    assert oldest > 0
    assert num_out_of_order > 20


def test_the_same_script_gives_the_same_run() -> None:
    chance = random.Random(2)
    for _ in range(10):
        one = script(chance, total_steps=4)
        assert Simulation(one).run() == Simulation(one).run()


def test_too_many_prompts_without_signal_end_the_wait() -> None:
    one = Script(
        lengths=[[1, 2]] * 40,
        prompts_per_step=2,
        total_steps=3,
        max_staleness=1,
        max_without_signal=4,
        without_signal=frozenset(range(2, 40)),
    )
    simulation = Simulation(one)
    simulation.run_until(lambda: simulation.buffer.is_ready)
    assert simulation.buffer.take().is_trained == [True, True]
    simulation.push_weights()
    simulation.run_until(lambda: simulation.buffer.is_ready)
    assert not simulation.buffer.staleness.is_ready
    assert simulation.buffer.staleness.num_dropped > 4


def test_too_many_prompts_that_are_given_up_end_the_run_with_their_causes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Script(
        lengths=[[5, 5]] * 9, prompts_per_step=3, total_steps=3, max_staleness=1, failing=frozenset([1, 4, 5])
    )
    simulation = Simulation(one)
    assert [row for step in simulation.run().steps for row in step.uids] == [
        "0-0",
        "0-2",
        "0-3",
        "0-6",
        "0-7",
        "0-8",
        "1-0",
        "1-2",
        "1-3",
    ]
    assert simulation.buffer.num_failed == 4
    assert "dropped: prompt 0-4: scripted" in caplog.text

    with pytest.raises(
        FailedPromptsError,
        match=r"step 1: there are no samples for 2 prompts, .*max_error_rate=0.4 of 3 allows:\n  prompt 0-1: "
        r"scripted\n",
    ):
        Simulation(replace(one, max_error_rate=0.4)).run()


def test_a_wait_for_a_step_that_never_comes_is_refused() -> None:
    one = Script(lengths=[[3]] * 4, prompts_per_step=2, total_steps=2, num_engines=1)
    simulation = Simulation(one)
    simulation.run()
    with pytest.raises(StalledError, match="step 3 waits for samples"):
        simulation.run_until(lambda: simulation.buffer.is_ready)  # no such step exists
