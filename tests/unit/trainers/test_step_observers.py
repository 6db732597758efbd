"""Observers of a run's steps: slow ranks, profiler traces, and predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig, ProfileConfig
from megarl.config.shipped import CONFIGS_DIR, with_published_models
from megarl.config.validate import read_architectures
from megarl.controller.calls import Call
from megarl.controller.errors import PhaseTimeoutError, RankFailure, WorkerError
from megarl.controller.futures import RemoteFuture
from megarl.controller.group import RoleGroup
from megarl.controller.messages import CallFailure, FailureKind
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import load_device
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import PredictedCosts
from megarl.trainers.step_observers import NUM_UPDATES, SpeedHistory, StepProfiler, predicted_metrics
from tests.metric_names import unknown_metrics

# Test when a rank counts as slow, with times that were measured on a busy machine.

FACTOR = 1.5
# Times of the probe in 40 updates of four ranks on two cores with a load of 13, in units of 10 us. One rank took
# more than 1.5 times as long as its peers in three updates in a row.
RECORDED = (
    (
        65,
        67,
        70,
        381,
        76,
        65,
        62,
        64,
        68,
        68,
        66,
        73,
        62,
        63,
        65,
        66,
        68,
        946,
        62,
        73,
        64,
        62,
        62,
        65,
        61,
        67,
        65,
        338,
        287,
        1716,
        58,
        400,
        217,
        70,
        68,
        63,
        62,
        62,
        60,
        63,
    ),
    (
        74,
        63,
        64,
        64,
        65,
        74,
        72,
        64,
        81,
        59,
        66,
        62,
        65,
        62,
        62,
        70,
        64,
        338,
        2814,
        307,
        70,
        62,
        69,
        369,
        62,
        66,
        62,
        62,
        66,
        63,
        64,
        62,
        69,
        62,
        62,
        69,
        62,
        68,
        65,
        65,
    ),
    (
        658,
        66,
        66,
        65,
        68,
        63,
        63,
        65,
        69,
        60,
        62,
        60,
        300,
        63,
        59,
        67,
        69,
        1011,
        1190,
        309,
        956,
        70,
        67,
        778,
        65,
        73,
        64,
        62,
        65,
        62,
        64,
        60,
        63,
        63,
        243,
        62,
        321,
        65,
        158,
        61,
    ),
    (
        64,
        63,
        65,
        77,
        73,
        64,
        64,
        64,
        59,
        60,
        62,
        59,
        60,
        62,
        63,
        71,
        64,
        1016,
        63,
        166,
        66,
        62,
        110,
        66,
        62,
        65,
        1198,
        63,
        209,
        72,
        70,
        65,
        63,
        63,
        64,
        64,
        68,
        63,
        60,
        60,
    ),
)
UPDATES = [dict(enumerate(times)) for times in zip(*RECORDED, strict=True)]


def see(history: SpeedHistory, updates: list[dict[int, float]]) -> list[tuple[int, tuple[int, float]]]:
    """Return the ranks that are reported, with the number of the update."""
    return [(number, slow) for number, update in enumerate(updates, 1) for slow in history.see(update)]


def slowed(updates: list[dict[int, float]], rank: int, factor: float) -> list[dict[int, float]]:
    return [{**update, rank: update[rank] * factor} for update in updates]


def test_noise_is_not_reported() -> None:
    history = SpeedHistory(FACTOR)
    assert see(history, UPDATES * 3) == []


@pytest.mark.parametrize("rank", range(4))
def test_a_slow_rank_is_reported_once(rank: int) -> None:
    history = SpeedHistory(FACTOR)
    ((number, (slow_rank, ratio)),) = see(history, slowed(UPDATES * 3, rank, 3.0))
    assert slow_rank == rank
    assert NUM_UPDATES <= number < 60
    assert ratio == pytest.approx(3.0, rel=0.2)


def test_a_rank_that_was_fast_in_between_is_reported_again() -> None:
    """Two ranks with constant times: the ratio is that of the two."""
    even = [{0: 1.0, 1: 1.0}]
    slow = [{0: 1.0, 1: 1.6}]
    history = SpeedHistory(FACTOR)
    found = (1, pytest.approx(1.6))
    assert see(history, slow * (NUM_UPDATES - 1) + even) == []
    assert see(history, slow * 3 * NUM_UPDATES) == [(NUM_UPDATES, found)]
    assert history.largest_ratio(4) == pytest.approx(1.6)
    assert see(history, even * (NUM_UPDATES - 1) + slow * 2 * NUM_UPDATES) == []  # the same episode
    assert see(history, even * NUM_UPDATES + slow * NUM_UPDATES) == [(2 * NUM_UPDATES, found)]


def test_the_largest_ratio_is_that_of_the_slowest_rank() -> None:
    """The median of its ratios over the last updates, by hand."""
    history = SpeedHistory(FACTOR)
    see(history, [{0: 1.0, 1: 9.0, 2: 1.0}, {0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 4.0, 2: 2.0}])
    assert history.largest_ratio(2) == pytest.approx(median([1.0, 2.0]))
    assert history.largest_ratio(3) == pytest.approx(median([9.0, 1.0, 2.0]))


# Test which errors of the profiler's own calls end a run, with groups that only record calls.

BEGIN, END = "begin_profile", "end_profile"


def failed(kind: FailureKind) -> WorkerError:
    failure = CallFailure(kind, f"this is its {kind.name}", "", 0.0)
    return WorkerError(RankFailure("actor", 0, "10.0.0.2", 7, BEGIN, failure))


class Answer(RemoteFuture[Any]):
    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    @property
    def calls(self) -> Sequence[Call]:
        return ()

    def get(self, timeout: float | None = None) -> Any:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Group(RoleGroup):
    """Stub of one rank, whose calls of `errors` fail."""

    world_size = 1  # pyrefly: ignore[bad-override]

    def __init__(self, role: str, errors: dict[str, Exception], called: list[str]) -> None:
        self.role = role
        self._errors = errors
        self._called = called

    def call_rank(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method.name
        self._called.append(f"{self.role}.{name}")
        error = self._errors.get(name)
        # A group that exceeded a limit accepts no calls.
        if isinstance(error, PhaseTimeoutError):
            raise error
        return Answer(error or f"{self.role}.json")


def profiler(errors: dict[str, Exception], called: list[str]) -> StepProfiler:
    config = ProfileConfig(steps=(2,), roles=("critic", "actor"))
    groups = [Group("critic", {}, called), Group("actor", errors, called)]
    return StepProfiler(config, groups, Path("run"))


HUNG = PhaseTimeoutError("actor", BEGIN, 60.0, [])


@pytest.mark.parametrize("error", [failed(FailureKind.death), failed(FailureKind.device), HUNG])
@pytest.mark.parametrize("where", [BEGIN, END])
def test_a_rank_that_is_lost_around_a_step_does_not_end_the_run(
    error: Exception, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The step recovers from the loss; the other ranks end what they began."""
    called: list[str] = []
    num_steps = 0
    with profiler({where: error}, called).step(2):
        num_steps += 1
    assert num_steps == 1
    assert called == [f"{role}.{name}" for name in (BEGIN, END) for role in ("critic", "actor")]
    (line,) = (record.message for record in caplog.records if "a rank was lost" in record.message)
    assert "actor" in line


@pytest.mark.parametrize("where", [BEGIN, END])
def test_an_error_of_the_profiler_itself_ends_the_run(where: str) -> None:
    """A full disk, for example, would come again."""
    profiled = profiler({where: failed(FailureKind.exception)}, []).step(2)
    with pytest.raises(WorkerError, match="this is its exception"), profiled:
        pass


def test_an_error_of_the_step_is_not_the_profilers() -> None:
    called: list[str] = []
    with pytest.raises(WorkerError, match="this is its death"), profiler({}, called).step(2):
        raise failed(FailureKind.death)
    assert called == [f"critic.{BEGIN}", f"actor.{BEGIN}"]


def test_other_steps_are_not_profiled() -> None:
    called: list[str] = []
    with profiler({BEGIN: HUNG}, called).step(3):
        pass
    assert called == []


# Test the predicted times of a run as metrics.

DEVICE = load_device("h100_80gb")


def run(name: str) -> PPOConfig:
    path = CONFIGS_DIR / f"{name}.yaml"
    return with_published_models(load_config(PPOConfig, path), str(path))[0]


def metrics(config: PPOConfig, prompt: float, response: float) -> dict[str, float]:
    measured = {"prompt_length/mean": prompt, "response_length/mean": response}
    return predicted_metrics(config, plan_placement(config), read_architectures(config)[0], DEVICE, measured)


def test_a_step_is_predicted_for_its_own_lengths() -> None:
    config = run("qwen3_32b_grpo")
    costs = PredictedCosts(DEVICE, expected_lengths(config, 300, 2000))
    step = costs.predict_step(config, plan_placement(config), read_architectures(config)[0])
    found = metrics(config, 300.0, 2000.0)
    assert found["perf/predicted_step_s"] == step.seconds
    assert found["predicted_s/update_actor"] == step.phases["update_actor"].seconds
    assert found["predicted_s/gen"] == step.phases["gen"].seconds
    assert metrics(config, 300.0, 4000.0)["perf/predicted_step_s"] > 1.5 * step.seconds
    assert unknown_metrics(found) == []


def test_generation_ahead_is_predicted_as_the_time_that_the_trainer_waits() -> None:
    config = run("qwen2.5_7b_async_grpo")
    # Short samples: the engines are faster than training, which never waits.
    assert metrics(config, 100.0, 200.0)["predicted_s/gen"] == 0
    longer = metrics(config, 10.0, 200.0)
    trained_s = sum(seconds for name, seconds in longer.items() if name.startswith("predicted_s/"))
    driver_s = config.samples_per_step * DEVICE.sample_ms / 1e3
    assert longer["perf/predicted_step_s"] == pytest.approx(trained_s + driver_s)


def test_lengths_beyond_the_limits_count_as_the_limits() -> None:
    config = run("qwen3_32b_grpo")
    assert metrics(config, 1e6, 1e6) == metrics(config, config.longest_prompt, config.longest_response)


def test_nothing_is_predicted_for_a_step_without_samples() -> None:
    config = run("qwen3_32b_grpo")
    plan = plan_placement(config)
    without = {"timing_s/step": 1.0}
    assert predicted_metrics(config, plan, read_architectures(config)[0], DEVICE, without) == {}
