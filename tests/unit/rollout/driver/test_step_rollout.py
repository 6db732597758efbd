"""Test synchronous and asynchronous generation with fake replicas: order, ages, dropped and lost groups,
stored groups, and shutdown."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import CurriculumConfig, OnUpdate, SamplingConfig
from megarl.data.curriculum import CurriculumLoader, LearnabilitySampler
from megarl.data.loader import BatchLoader, RowLoader
from megarl.data.tables import RowIdentity
from megarl.machine.background import in_background
from megarl.machine.errors import RunError
from megarl.rehearse.simulation.engines import ScriptedEngines, VirtualClock
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.rollout_buffer import FailedPromptsError
from megarl.rollout.driver.sample_rows import (
    GREEDY,
    FinishedGroup,
    GroupRules,
    from_bytes,
    sample_rows,
    to_bytes,
)
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.driver.step_rollout import GenerationThread, StepRollout
from megarl.rollout.staleness import NoSignalError, StalenessController
from megarl.trainers.ppo import Sampling
from tests.fake_engine import plain_sample

SAMPLING = SamplingConfig(n=2)
NUM_ROWS = 64
PROMPTS = 3
YIELD_S = 0.0005  # of wall time, so that the generation thread does not spin
LIMITS = {"max_concurrency": 2, "answer_limit_s": 60, "sample_limit_s": 200}


class Prompts:
    """Data set in which row i requests a sample of some tokens."""

    identity = RowIdentity("prompts")

    def __len__(self) -> int:
        return NUM_ROWS

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows(
            [[1 + (37 * index) % 101] for index in indices], torch.int32, on_left=True
        )
        return DataProto.from_dict({"prompts": prompts}, {"uid": list(uids)})


class MadeUpWeights:
    """Stub for RolloutWeights."""

    def __init__(self, engines: ScriptedEngines, version: int) -> None:
        self._engines = engines
        self.version = version

    @property
    def actor_version(self) -> int:
        return self.version

    def bring_in(self) -> None: ...

    def can_readmit(self) -> bool:
        return True

    def readmit(self, number: int) -> bool:
        return self._engines.readmit(number)

    def push(self) -> None:
        with self._engines.exclusive(for_weights=True):
            self.version += 1
            self._engines.push(self.version)


def trains_in_no_time(on_update: OnUpdate, scheduler: RequestScheduler) -> bool:
    """Return whether the generation thread must not generate now.

    It generates only while the trainer waits for a step, so that neither thread's speed has an effect.
    Samples of later steps are therefore in flight when weights are synced. With `drain`, which waits for
    them, the generation thread runs at all times.
    """
    is_ahead = threading.current_thread().name == "generation"
    trains = is_ahead and on_update is OnUpdate.continue_ and not scheduler.may_readmit
    if trains:
        time.sleep(YIELD_S)
    return trains


class SchedulerInNoTime(RequestScheduler):
    on_update = OnUpdate.continue_

    def poll(self, wait_s: float = math.inf) -> None:
        if not trains_in_no_time(self.on_update, self):
            super().poll(wait_s)


class Unscored:
    """Stub for Reward that is never called."""

    may_begin = False
    scores_rounds = False

    def score_round(self, groups: DataProto) -> dict[str, list[float]]:
        raise AssertionError

    def begin(self, groups: DataProto) -> None:
        raise AssertionError

    def scored(self) -> dict[str, list[float]]:
        raise AssertionError


class ScoresBySignal(Unscored):
    """Stub for Reward: the samples of prompts in rows divisible by 3 all have the same score."""

    may_begin = True

    def __init__(self) -> None:
        self._scores: dict[str, list[float]] = {}
        self.begun: list[list[str]] = []

    def begin(self, groups: DataProto) -> None:
        uids = groups.non_tensor_batch["uid"].tolist()
        self.begun.append(uids)
        for uid in uids[:: SAMPLING.n]:
            self._scores[uid] = [1.0, float(int(uid.partition("-")[2]) % 3 == 0)]

    def scored(self) -> dict[str, list[float]]:
        scores = self._scores
        self._scores = {}
        return scores

    def finish(self, batch: DataProto) -> DataProto:
        rows = batch.non_tensor_batch["uid"][:: SAMPLING.n]
        scores = [[1.0, float(int(uid.partition("-")[2]) % 3 == 0)] for uid in rows]
        return DataProto.from_dict(
            {}, {"score": [score for one in scores for score in one]}, {"reward/error_rate": 0.0}
        )


class Scene(NamedTuple):
    rollout: Rollout
    engines: ScriptedEngines
    weights: MadeUpWeights
    buffered: StepRollout


class Trained(NamedTuple):
    uids: list[str]
    versions: np.ndarray  # of all tokens
    age: int


def has_thread() -> bool:
    return any(thread.name == "generation" for thread in threading.enumerate())


@contextmanager
def scene(
    max_staleness: int,
    total_steps: int,
    on_update: OnUpdate = OnUpdate.continue_,
    restart_limit: int = 1000,
    position: dict | None = None,
    next_step: int = 1,
    version: int = 1,
    rules: GroupRules = GroupRules(SAMPLING),  # noqa: B008  of values alone
    scoring: Unscored = Unscored(),  # noqa: B008  it has no state
    failing: Collection[int] = (),
    keeps_order: bool = True,
    loader: RowLoader | None = None,
) -> Iterator[Scene]:
    """Build the scene.

    Args:
        loader: Serves the prompts; None: epochs.
        failing: Tokens of prompts whose samples no engine can generate.
    """
    clock = VirtualClock()
    engines = ScriptedEngines(
        clock,
        2,
        lambda request: 0 if request.prompt[0] in failing else request.prompt[0],
        version=version,
        restart_limit=restart_limit,
        start_s=0.3,
        tick_s=0.01,
    )
    weights = MadeUpWeights(engines, version)
    tokens = TokenRules(pad_token_id=0, stop_token_ids=(), max_response_length=101)
    scheduler = SchedulerInNoTime(
        engines,  # type: ignore[arg-type]
        weights.readmit,
        **LIMITS,
        clock=lambda: clock.now_s,
        wait=clock.wait,
    )
    scheduler.on_update = on_update
    rollout = Rollout(scheduler, weights, tokens, seed=0)  # type: ignore[arg-type]
    loader = loader or BatchLoader(Prompts(), PROMPTS, shuffle=True, seed=0)

    def staleness(version: int) -> StalenessController:
        return StalenessController(
            max_staleness=max_staleness,
            prompts_per_step=PROMPTS,
            total_steps=total_steps,
            next_step=next_step,
            version=version,
            step_pushes=lambda step: True,
            in_order=keeps_order,
        )

    buffered = StepRollout(rollout, weights, loader, scoring, rules, on_update, staleness)  # type: ignore[arg-type]
    if position is not None:
        buffered.load_state_dict(position)

    try:
        yield Scene(rollout, engines, weights, buffered)
    finally:
        buffered.close()
        assert not has_thread()


def train(one: Scene, steps: Sequence[int], between: Callable[[], None] = lambda: None) -> list[Trained]:
    trained = []
    for step in steps:
        prompts = next(one.buffered)
        batch = one.buffered.generate(prompts, SAMPLING, step)
        between()
        assert batch.non_tensor_batch["uid"].tolist() == [
            uid for uid in prompts.non_tensor_batch["uid"] for _ in range(SAMPLING.n)
        ]
        lengths = batch.tensors["response_mask"].sum(1)
        assert torch.equal(lengths, batch.tensors["prompts"][:, 0])  # each prompt has its own samples
        versions = batch.tensors["token_versions"][batch.tensors["response_mask"]].numpy()
        assert batch.meta_info["weight_version"] == one.weights.version
        scored = batch.union(DataProto.from_dict({}, {"score": scores_of_rows(batch)}))
        # A step that is repeated, after an earlier one, records its scores again.
        for number in (step, step - 1, step):
            one.buffered.record_scores(scored, number)
        trained.append(
            Trained(
                prompts.non_tensor_batch["uid"].tolist(), versions, int(one.weights.version - versions.min())
            )
        )
        one.weights.push()
        one.buffered.end_step(step)

    return trained


def scores_of_rows(batch: DataProto) -> list[float]:
    """Score the two samples of a prompt in row i 1 and i % 3 == 0."""
    rows = [int(uid.partition("-")[2]) for uid in batch.non_tensor_batch["uid"]]
    return [float(place % SAMPLING.n == 0 or row % 3 == 0) for place, row in enumerate(rows)]


class Counted(LearnabilitySampler):
    """Sampler that remembers the rows of its updates, in order."""

    def __init__(self) -> None:
        super().__init__(NUM_ROWS, CurriculumConfig(), shuffle=True, seed=0)
        self.updates: list[list[int]] = []

    def update(self, rows: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        self.updates.append(list(rows))
        super().update(rows, scores)


def curriculum() -> tuple[Counted, CurriculumLoader]:
    sampler = Counted()
    return sampler, CurriculumLoader(Prompts(), PROMPTS, sampler, "learnability")


def in_order(num_steps: int) -> list[list[str]]:
    loader = BatchLoader(Prompts(), PROMPTS, shuffle=True, seed=0)
    return [next(loader).non_tensor_batch["uid"].tolist() for _ in range(num_steps)]


IN_BOTH_MODES = pytest.mark.parametrize(
    ("max_staleness", "on_update"), [(0, OnUpdate.continue_), (2, OnUpdate.continue_), (2, OnUpdate.drain)]
)


def test_in_turn_with_training_each_step_has_its_prompts_by_the_weights_of_now() -> None:
    with scene(0, 12) as one:
        trained = train(one, range(1, 13))
        assert not has_thread()
        assert one.buffered.drain_metrics(one.buffered.taken) == {}
        assert one.buffered.finished_groups() == []
    assert [step.uids for step in trained] == in_order(12)
    assert [set(step.versions.tolist()) for step in trained] == [{version} for version in range(1, 13)]


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_prompts_are_trained_in_order_and_ages_are_within_the_bound(max_staleness: int) -> None:
    chance = random.Random(max_staleness)
    with scene(max_staleness, 12) as one:
        trained = train(one, range(1, 13), lambda: time.sleep(chance.choice([0, 0, 0.004])))
    assert [step.uids for step in trained] == in_order(12)
    assert 1 <= max(step.age for step in trained) <= max_staleness
    assert all(step.age >= 0 for step in trained)
    assert any(len(set(step.versions.tolist())) > 1 for step in trained)


def test_with_drain_each_sample_is_by_one_version_which_the_schedule_decides() -> None:
    runs = []
    for pause in (lambda: None, lambda: time.sleep(0.003)):
        with scene(2, 8, OnUpdate.drain) as one:
            runs.append(train(one, range(1, 9), pause))

    for first, second in zip(*runs, strict=True):
        assert first.uids == second.uids
        assert first.versions.tolist() == second.versions.tolist()

    assert [step.age for step in runs[0]] == [0, 1, 2, 2, 2, 2, 2, 2]


def test_replicas_that_are_lost_cost_no_prompt_and_no_age() -> None:
    chance = random.Random(3)
    with scene(2, 12) as one:

        def lose() -> None:
            with one.engines.exclusive():
                if chance.random() < 0.6:
                    one.engines.restart(chance.randrange(2), "killed")

        trained = train(one, range(1, 13), lose)
        assert len(one.engines.restarted) > 3

    assert [step.uids for step in trained] == in_order(12)
    assert max(step.age for step in trained) <= 2


def test_validation_goes_first_and_begins_no_group() -> None:
    """Nothing is generated before the first step, since the weights may be missing."""
    with scene(2, 6) as one:
        held_out = Prompts().batch([5, 6], ["5", "6"])
        before = one.rollout.generate(held_out, SamplingConfig(n=1), 0)
        assert sum(len(given) for engine in one.engines.groups for _, given in engine.submitted) == 2
        trained = train(one, [1, 2])
        with one.engines.exclusive():
            live = list(one.buffered._buffer.staleness.live)  # type: ignore[union-attr]
            after = one.rollout.generate(held_out, SamplingConfig(n=1), 0)
            assert one.buffered._buffer.staleness.live == live  # type: ignore[union-attr]
        assert after.non_tensor_batch["weight_version"].tolist() == [3, 3]
        assert torch.equal(after.tensors["responses"], before.tensors["responses"])
        trained += train(one, [3, 4, 5, 6])
    assert [step.uids for step in trained] == in_order(6)


@IN_BOTH_MODES
def test_the_greedy_response_to_a_prompt_comes_with_its_samples(
    max_staleness: int, on_update: OnUpdate
) -> None:
    with scene(max_staleness, 3, on_update, rules=GroupRules(SAMPLING, greedy=True)) as one:
        for step in (1, 2, 3):
            prompts = next(one.buffered)
            assert len(one.buffered.generate(prompts, SAMPLING, step)) == PROMPTS * SAMPLING.n
            greedy = one.buffered.generate(prompts, GREEDY, step)
            assert greedy.non_tensor_batch["uid"].tolist() == in_order(3)[step - 1]
            one.weights.push()
        temperatures = [
            request.sampling.temperature
            for engine in one.engines.groups
            for _, given in engine.submitted
            for request in given
        ]

    assert temperatures.count(0.0) == 3 * PROMPTS
    assert temperatures.count(SAMPLING.temperature) == 3 * PROMPTS * SAMPLING.n


@IN_BOTH_MODES
def test_prompts_without_signal_are_dropped_and_others_trained_in_their_place(
    max_staleness: int, on_update: OnUpdate
) -> None:
    """Ahead of training, later groups move up. At staleness 0 there may be a surplus, which is discarded."""
    scoring = ScoresBySignal()
    rules = GroupRules(SAMPLING, max_without_signal=9)
    with_signal = [uid for step in in_order(12) for uid in step if int(uid.partition("-")[2]) % 3]

    with scene(max_staleness, 5, on_update, rules=rules, scoring=scoring) as one:
        sampling = Sampling(one.buffered, scoring, rules)  # type: ignore[arg-type]
        num_dropped = 0.0
        for step in range(1, 6):
            groups = one.buffered.next_step()
            batch, metrics = sampling.generate(groups, step)
            surplus = int(metrics["dynamic_sampling/num_surplus"])
            assert surplus == 0 or max_staleness == 0
            wanted = with_signal[:PROMPTS]
            with_signal = with_signal[PROMPTS + surplus :]
            assert batch.non_tensor_batch["uid"].tolist() == [
                uid for uid in wanted for _ in range(SAMPLING.n)
            ]
            assert sampling.score(batch, groups) == []  # they are in the batch
            dropped = metrics["dynamic_sampling/num_without_signal"]
            num_dropped += dropped
            assert metrics["dynamic_sampling/num_prompts"] == PROMPTS + dropped + surplus
            ages = one.weights.version - batch.tensors["token_versions"][batch.tensors["response_mask"]]
            assert 0 <= ages.min() <= ages.max() <= max_staleness
            one.weights.push()

    assert num_dropped > 2


@IN_BOTH_MODES
def test_too_many_prompts_without_signal_end_the_run(max_staleness: int, on_update: OnUpdate) -> None:
    rules = GroupRules(SAMPLING, max_without_signal=0)
    with (
        scene(max_staleness, 9, on_update, rules=rules, scoring=ScoresBySignal()) as one,
        pytest.raises(NoSignalError, match=r"step \d: only \d of \d+ prompts have .*max_generations=1 "),
    ):
        train(one, range(1, 10))


class FailsToScore(ScoresBySignal):
    """Stub for Reward whose functions fail for every sample, as `reward.max_error_rate` may allow."""

    def scored(self) -> dict[str, list[float]]:
        return {uid: [] for uid in super().scored()}


def test_prompts_without_any_score_end_the_run_and_the_message_says_so() -> None:
    rules = GroupRules(SAMPLING, max_without_signal=0)
    with (
        scene(0, 9, OnUpdate.drain, rules=rules, scoring=FailsToScore()) as one,
        pytest.raises(NoSignalError, match="only 0 of .* the mean score is unknown, no sample was scored"),
    ):
        train(one, [1])


@IN_BOTH_MODES
def test_prompts_that_no_engine_can_generate_are_replaced_up_to_the_error_rate(
    max_staleness: int, on_update: OnUpdate
) -> None:
    rows = [uid for step in in_order(12) for uid in step]
    failing = [rows[1], rows[7], rows[8]]
    tokens = [1 + (37 * int(uid.partition("-")[2])) % 101 for uid in failing]

    with scene(
        max_staleness, 6, on_update, rules=GroupRules(SAMPLING, max_error_rate=1.0), failing=tokens
    ) as one:
        trained = train(one, range(1, 7))
        assert one.buffered.drain_metrics(one.buffered.taken)["rollout/num_given_up"] == len(failing)
    uids = [uid for step in trained for uid in step.uids]
    if max_staleness:
        assert uids == [uid for uid in rows if uid not in failing][: 6 * PROMPTS]
    else:
        assert uids == sorted(uids, key=rows.index)
        assert not set(uids) & set(failing)
        assert len(set(uids)) == 6 * PROMPTS

    with (
        scene(max_staleness, 6, on_update, rules=GroupRules(SAMPLING), failing=tokens) as one,
        pytest.raises(
            FailedPromptsError,
            match=rf"step 1: there are no samples for 1 prompt, .*=0 of 3 .*\n  prompt {rows[1]}: scripted",
        ),
    ):
        train(one, range(1, 7))


@IN_BOTH_MODES
def test_prompts_that_have_their_samples_are_scored_while_others_are_generated(
    max_staleness: int, on_update: OnUpdate
) -> None:
    scoring = ScoresBySignal()
    with scene(max_staleness, 4, on_update, scoring=scoring) as one:
        trained = train(one, range(1, 5))
    begun = [uid for uids in scoring.begun for uid in uids]
    assert len(scoring.begun) > 4  # not a whole step at a time
    left = Counter(uid for step in trained for uid in step.uids for _ in range(SAMPLING.n))
    left.subtract(begun)
    assert set(left.values()) <= {0, SAMPLING.n}

    # At staleness 0, the groups that finish last are scored with their step.
    late = [sum(left[uid] > 0 for uid in step.uids) for step in trained]
    assert all(0 < count < PROMPTS for count in late) if max_staleness == 0 else not any(late)

    later = ScoresBySignal()
    with scene(
        max_staleness, 4, on_update, rules=GroupRules(SAMPLING, scores_early=False), scoring=later
    ) as one:
        train(one, range(1, 5))
    assert later.begun == []


@IN_BOTH_MODES
def test_prompts_of_another_origin_are_generated_when_they_are_asked_for(
    max_staleness: int, on_update: OnUpdate
) -> None:
    with scene(max_staleness, 3, on_update) as one:
        prompts = next(one.buffered)
        own = Prompts().batch([5, 6], ["a", "b"])
        batch = one.buffered.generate(own, SAMPLING, 1)
        assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
        some = one.buffered.generate(prompts.select_idxs([2, 0]), SAMPLING, 1)
        whole = one.buffered.generate(prompts, SAMPLING, 1)
        assert torch.equal(some.tensors["responses"], whole.select_idxs([4, 5, 0, 1]).tensors["responses"])


def test_what_generation_raises_the_trainer_is_told() -> None:
    with scene(1, 5, restart_limit=0) as one:
        train(one, [1])
        with one.engines.exclusive():
            one.engines.groups[0].call = lambda method, *arguments: failing()  # type: ignore[method-assign, assignment]
        with pytest.raises(RunError, match="no such layer"):
            train(one, [2, 3, 4])


def failing() -> None:
    raise RunError("no such layer")


def test_a_step_that_is_awaited_while_the_thread_fails_raises_its_error() -> None:
    polled, awaited = threading.Event(), threading.Event()

    def poll(wait_s: float) -> None:
        polled.set()
        awaited.wait()
        failing()

    runner = SimpleNamespace(is_at_work=True, poll=poll, may_readmit=False)
    rollout = SimpleNamespace(runner=runner, scheduler=runner)
    buffer = SimpleNamespace(score=lambda: None, begin=lambda: None)
    thread = GenerationThread(rollout, buffer, OnUpdate.drain)  # type: ignore[arg-type]
    polled.wait()
    taking = in_background(thread.take, "taking")
    time.sleep(0.05)  # until it waits for the turn
    awaited.set()
    with pytest.raises(RunError, match="no such layer"):
        taking.result(timeout=60)
    with pytest.raises(RunError, match="no such layer"):  # as every later one
        thread.take()
    thread.stop()
    assert not has_thread()


def test_an_error_in_a_pause_lets_the_step_end_and_is_raised_by_the_next_one() -> None:
    runner = SimpleNamespace(
        is_at_work=False, poll=lambda wait_s: None, may_readmit=False, pause=lambda: failing()
    )
    rollout = SimpleNamespace(runner=runner, scheduler=runner)
    buffer = SimpleNamespace(score=lambda: None, begin=lambda: None, awaits_scores=False)
    thread = GenerationThread(rollout, buffer, OnUpdate.drain)  # type: ignore[arg-type]
    uses = list[str]()
    with thread.exclusive(for_weights=True):
        uses.append("a weight sync")
    with thread.exclusive():
        uses.append("a checkpoint")
    assert uses == ["a weight sync", "a checkpoint"]
    with pytest.raises(RunError, match="no such layer"):
        thread.take()
    thread.stop()
    assert not has_thread()


def test_after_a_failed_weight_sync_nothing_is_generated_until_one_succeeds() -> None:
    iterated = threading.Semaphore(0)
    runner = SimpleNamespace(
        is_at_work=True, poll=lambda wait_s: iterated.release(), may_readmit=False, pause=lambda: None
    )
    rollout = SimpleNamespace(runner=runner, scheduler=runner)
    buffer = SimpleNamespace(score=lambda: None, begin=lambda: None)
    thread = GenerationThread(rollout, buffer, OnUpdate.continue_)  # type: ignore[arg-type]

    with pytest.raises(RunError, match="no such layer"), thread.exclusive(for_weights=True):
        failing()
    while iterated.acquire(blocking=False):  # those before the sync
        pass
    with thread.exclusive(), thread.exclusive():  # nested, as in a validation
        pass
    assert not iterated.acquire(timeout=0.1)
    with thread.exclusive(for_weights=True):
        pass
    assert iterated.acquire(timeout=60)
    thread.stop()
    assert not has_thread()


def assert_same(one: FinishedGroup, other: FinishedGroup) -> None:
    assert one._replace(rows=other.rows) == other
    assert one.rows.ragged == other.rows.ragged
    assert {name: rows.tolist() for name, rows in one.rows.non_tensor_batch.items()} == {
        name: rows.tolist() for name, rows in other.rows.non_tensor_batch.items()
    }


def test_a_run_that_goes_on_trains_the_same_prompts_and_generates_nothing_twice() -> None:
    with scene(2, 10, OnUpdate.drain) as one:
        before = train(one, range(1, 5))
        position = one.buffered.state_dict()
        groups = one.buffered.finished_groups()
        version = one.weights.version

    stored = from_bytes(to_bytes(groups))
    assert [group.uid for group in groups] == list(stored)
    with pytest.raises(ValueError, match="is corrupt"):
        from_bytes(to_bytes(groups)[:-1])
    for before_it, after_it in zip(groups, stored.values(), strict=True):
        assert_same(before_it, after_it)
    samples = [plain_sample([5, 5], [-1.0, -2.0], "length", 5)] * SAMPLING.n
    routed = [sample._replace(routed_experts=np.arange(6, dtype=np.uint8)) for sample in samples]
    with_routes = FinishedGroup("uid", 5, sample_rows(routed), is_dropped=True)
    assert_same(from_bytes(to_bytes([with_routes]))["uid"], with_routes)

    with scene(2, 10, OnUpdate.drain, position=position, next_step=5, version=version) as other:
        other.buffered.restore(stored)
        after = train(other, range(5, 11))
        begun = sum(len(given) for engine in other.engines.groups for _, given in engine.submitted)

    assert [step.uids for step in before + after] == in_order(10)
    assert begun == (6 * PROMPTS - len(stored)) * SAMPLING.n
    with scene(2, 10, OnUpdate.drain) as one:
        whole = train(one, range(1, 11))
    assert [step.versions.tolist() for step in before + after] == [step.versions.tolist() for step in whole]


@pytest.mark.parametrize(("max_staleness", "keeps_order"), [(1, True), (0, True), (0, False)])
def test_stored_samples_that_are_too_old_now_are_generated_again(
    max_staleness: int, keeps_order: bool
) -> None:
    """A run resumed with `max_staleness` 0 has samples of older weights, whatever `late` is."""
    position = BatchLoader(Prompts(), PROMPTS, shuffle=True, seed=0).state_dict()
    with scene(max_staleness, 6, position=position, version=7, keeps_order=keeps_order) as one:
        samples = [plain_sample([5, 5], [-1.0, -2.0], "length", 5)] * SAMPLING.n
        rows = sample_rows(samples)
        one.buffered.restore({uid: FinishedGroup(uid, 5, rows) for step in in_order(2) for uid in step})
        assert train(one, [1])[0].versions.min() == 7


def test_stored_samples_of_another_configuration_are_generated_again() -> None:
    position = BatchLoader(Prompts(), PROMPTS, shuffle=True, seed=0).state_dict()
    sample = plain_sample([5, 5], [-1.0, -2.0], "length", 7)
    routed = sample._replace(routed_experts=np.zeros(6, np.uint8))
    for samples in ([sample], [routed] * SAMPLING.n):
        rows = sample_rows(samples)
        with scene(1, 6, position=position, version=7) as one:
            one.buffered.restore({uid: FinishedGroup(uid, 7, rows) for step in in_order(2) for uid in step})
            # It compares the lengths with those of samples that this run generates.
            train(one, [1])


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_curriculum_goes_on_with_its_samples_and_learns_once_from_each_step(max_staleness: int) -> None:
    sampler, loader = curriculum()
    with scene(max_staleness, 12, OnUpdate.drain, loader=loader) as one:
        whole = train(one, range(1, 13))
    assert sampler.updates == [[int(uid.partition("-")[2]) for uid in step.uids] for step in whole]

    _, loader = curriculum()
    with scene(max_staleness, 12, OnUpdate.drain, loader=loader) as one:
        before = train(one, range(1, 6))
        position = json.loads(json.dumps(one.buffered.state_dict()))
        stored = {group.uid: group for group in one.buffered.finished_groups()}
        version = one.weights.version
    # Drawn for the steps that may train samples of these weights.
    assert len(position["served"]) == (9 if max_staleness else 0)

    sampler, loader = curriculum()
    resumed = scene(
        max_staleness, 12, OnUpdate.drain, position=position, next_step=6, version=version, loader=loader
    )
    with resumed as other:
        other.buffered.restore(stored)
        after = train(other, range(6, 13))
    assert [step.uids for step in before + after] == [step.uids for step in whole]
    assert [step.versions.tolist() for step in before + after] == [step.versions.tolist() for step in whole]
    assert len(sampler.updates) == 7
    assert 0 < sampler.metrics()["low_weight"] < 1


def test_scores_of_prompts_of_ones_own_are_refused_when_they_are_recorded() -> None:
    _, loader = curriculum()
    with scene(0, 3, loader=loader) as one:
        batch = DataProto.from_dict({}, {"uid": ["mine"], "score": [1.0]})
        with pytest.raises(ValueError, match="the uid 'mine', which is not that of a training prompt"):
            one.buffered.record_scores(batch, 1)


def test_a_curriculum_learns_from_prompts_that_are_dropped_too() -> None:
    sampler, loader = curriculum()
    rules = GroupRules(SAMPLING, max_without_signal=30)
    scoring = ScoresBySignal()
    with scene(0, 3, rules=rules, scoring=scoring, loader=loader) as one:
        sampling = Sampling(one.buffered, scoring, rules)  # type: ignore[arg-type]
        groups = one.buffered.next_step()
        sampling.generate(groups, 1)
        one.buffered.end_step(1)
        drawn = groups.prompts.non_tensor_batch["uid"].tolist()
    assert sampler.updates == [[int(uid.partition("-")[2]) for uid in drawn]]
    assert len(drawn) > PROMPTS
