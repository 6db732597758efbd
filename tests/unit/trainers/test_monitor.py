"""Test phase timings from synthetic spans, and how the monitor handles steps and validations."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from megarl.config.schema import LoggerKind
from megarl.controller.worker import registered_methods
from megarl.machine import clock as clock_module
from megarl.machine.errors import RunError
from megarl.rewards.reward_worker import RewardWorker
from megarl.roles.megatron_worker import ActorWorker, CriticWorker, PolicyWorker
from megarl.roles.reward_model_worker import RewardModelWorker
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.tracking.loggers import LOGGERS, JsonlLogger, Tracker
from megarl.tracking.progress import ProgressBar
from megarl.tracking.timeline import Span, Timeline
from megarl.tracking.tracked_run import TrackedRun
from megarl.trainers.monitor import Monitor, phase_spans, phases_by_call


def span(role: str, rank: int, name: str, start_s: float, end_s: float) -> Span:
    return Span(role if role == "driver" else f"pool of {role}", role, rank, name, start_s, end_s)


WORKERS = {
    "rollout": RolloutWorker,
    "reward": RewardWorker,
    "reward_model": RewardModelWorker,
    "actor": ActorWorker,
    "reference": PolicyWorker,
    "teacher": PolicyWorker,
    "critic": CriticWorker,
}


@pytest.mark.parametrize(("role", "call"), phases_by_call())
def test_phases_are_known_by_calls_that_workers_have(role: str, call: str) -> None:
    assert call in registered_methods(WORKERS[role])


@pytest.mark.parametrize("role", ["reward", "reward_model", "actor", "reference", "critic"])
def test_every_worker_call_belongs_to_a_phase(role: str) -> None:
    """Otherwise it would be in no timing, and would compute with the threads of the previous phase."""
    own = vars(WORKERS[role]).keys() & registered_methods(WORKERS[role])
    assert {(role, call) for call in own} <= phases_by_call().keys()
    assert own or role == "reference"


def test_a_phase_lasts_from_its_first_start_to_its_last_end() -> None:
    spans = [
        span("rollout", 0, "submit_and_poll", 10.0, 14.0),
        span("rollout", 1, "submit_and_poll", 10.5, 15.5),
        span("critic", 0, "update", 20.0, 21.0),  # two mini-batches, concurrent with the actor's
        span("critic", 0, "update", 22.0, 23.0),
        span("actor", 0, "update", 20.5, 26.0),
        span("actor", 0, "log_probs", 16.0, 17.0),  # two roles with one method: one phase for each
        span("reference", 0, "log_probs", 17.0, 19.5),
        span("actor", 0, "begin_weight_export", 27.0, 28.0),  # not a phase of its own
        span("driver", 0, "update_weights", 26.5, 29.0),
        span("driver", 0, "gen", 9.0, 12.5),  # the engines continued, for the next step
        span("driver", 0, "step", 10.0, 30.0),
    ]
    phases = {each.name: (each.role, each.start_s, each.end_s) for each in phase_spans(spans)}
    assert phases == {
        "gen": ("driver", 9.0, 12.5),
        "old_log_prob": ("actor", 16.0, 17.0),
        "ref": ("reference", 17.0, 19.5),
        "update_critic": ("critic", 20.0, 23.0),
        "update_actor": ("actor", 20.5, 26.0),
        "update_weights": ("driver", 26.5, 29.0),
        "step": ("driver", 10.0, 30.0),
    }


class Group:
    """Stub for a worker group, whose calls use other clocks."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def drain_spans(self) -> list[Span]:
        spans = self.spans
        self.spans = []
        return spans


class Clock:
    """Clock whose monotonic time advances by a second at every reading.

    Attributes:
        set_s: Offset added to the wall clock at every reading.
    """

    def __init__(self) -> None:
        self.now_s = 100.0
        self.set_s = self._set_by_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def time(self) -> float:
        self._set_by_s += self.set_s
        return self.now_s + self._set_by_s


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(clock_module, "time", made := Clock())
    return made


@pytest.fixture
def monitor(group: Group, tmp_path: Path, clock: Clock) -> Iterator[Monitor]:
    progress = ProgressBar("test", 2, Console(file=io.StringIO()))
    tracker = Tracker(["jsonl"], TrackedRun(output_dir=tmp_path))
    with Monitor([group], tracker, Timeline(tmp_path), progress, num_devices=4) as made:  # type: ignore[list-item]
        yield made


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


RESULT = {"val/score/mean": 0.5}, [{"uid": "0", "response": "x"}]


def test_validation_is_timed_apart_from_training(monitor: Monitor, group: Group, tmp_path: Path) -> None:
    with monitor.testing():  # the clock: from 101 to 102
        group.spans.append(span("rollout", 0, "submit_and_poll", 0.0, 50.0))
    monitor.record_validation(*RESULT, 0)

    with monitor.step(1):  # from 103 to 110
        with monitor.phase("gen"):
            group.spans.append(span("rollout", 0, "submit_and_poll", 60.0, 61.0))
        monitor.record({"num_tokens": 60.0})
        with monitor.phase("adv"):
            pass
        with monitor.testing():
            group.spans.append(span("rollout", 0, "submit_and_poll", 62.0, 99.0))
        monitor.record_validation(*RESULT, 1)

    before, step = logged(tmp_path)
    assert before == {"step": 0, "val/score/mean": 0.5, "timing_s/testing": 1.0}
    assert step == {
        "step": 1,
        "num_tokens": 60.0,
        "val/score/mean": 0.5,
        "timing_s/gen": 1.0,
        "timing_s/adv": 1.0,
        "timing_s/testing": 1.0,
        "timing_s/step": 7.0,
        "perf/trainer_idle": 1 / 6,
        "perf/throughput": 10.0,
        "perf/throughput_per_device": 2.5,
    }
    assert monitor.validations == [(0, 0.5), (1, 0.5)]


def test_the_timeline_has_validation_too(monitor: Monitor, group: Group, tmp_path: Path) -> None:
    with monitor.step(1), monitor.testing():
        group.spans.append(span("rollout", 0, "submit_and_poll", 1.0, 2.0))
    monitor.__exit__(None, None, None)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {"submit_and_poll", "testing", "step"}


def test_a_step_that_fails_is_not_logged(monitor: Monitor, tmp_path: Path) -> None:
    with pytest.raises(KeyError), monitor.step(1):
        raise KeyError("broken")
    assert logged(tmp_path) == []
    with monitor.step(2):
        monitor.record({"a": 1.0})
    with monitor.step(3):
        pass
    assert [sorted(line) for line in logged(tmp_path)] == [
        ["a", "step", "timing_s/step"],
        ["step", "timing_s/step"],
    ]


@pytest.mark.parametrize("set_s", [0.0, -3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_timing(
    monitor: Monitor, clock: Clock, tmp_path: Path, set_s: float
) -> None:
    clock.set_s = set_s
    with monitor.step(1):
        with monitor.phase("adv"):
            pass
        monitor.record({"num_tokens": 60.0})

    (line,) = logged(tmp_path)
    assert (line["timing_s/step"], line["timing_s/adv"], line["perf/throughput"]) == (3.0, 1.0, 20.0)


def test_a_run_whose_folder_was_removed_ends_and_does_not_make_it_anew(group: Group, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tracker = Tracker(["jsonl"], TrackedRun(output_dir=folder))
    progress = ProgressBar("test", 2, Console(file=io.StringIO()))
    monitor = Monitor([group], tracker, Timeline(folder), progress, num_devices=1)  # type: ignore[list-item]
    said = f"{folder}: the run's folder was removed or replaced"
    with pytest.raises(RunError, match=said), monitor, monitor.step(1):
        shutil.rmtree(folder)
    assert list(tmp_path.iterdir()) == []


def test_loggers_of_spans_get_the_phases_of_a_step(
    group: Group, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spans(JsonlLogger):
        received: ClassVar[list[tuple[int, list[str]]]] = []

        def log_spans(self, step: int, phases: Sequence[Span]) -> None:
            self.received.append((step, [phase.name for phase in phases]))

    monkeypatch.setitem(LOGGERS, LoggerKind.jsonl, Spans)
    tracker = Tracker(["jsonl"], TrackedRun(output_dir=tmp_path))
    progress = ProgressBar("test", 2, Console(file=io.StringIO()))
    monitor = Monitor([group], tracker, Timeline(tmp_path), progress, num_devices=1)  # type: ignore[list-item]
    with monitor, monitor.step(1):
        group.spans.append(span("actor", 0, "update", 1.0, 2.0))
    assert Spans.received == [(1, ["step", "update_actor"])]
