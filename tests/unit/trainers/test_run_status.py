"""Test the status of a run, with fake replicas and a fake clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.schema import PPOConfig, RolloutConfig, TrainerConfig
from megarl.machine import clock as clock_module
from megarl.rehearse.simulation.engines import ScriptedEngines, VirtualClock
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.interface import GenerationRequest, SamplingParameters
from megarl.tracking.status import GroupStatus, RunStatus
from megarl.trainers import run_status
from megarl.trainers.monitor import Position
from megarl.trainers.recovery import NoRecovery
from megarl.trainers.run_status import StatusReader

LIMITS = {"max_concurrency": 2, "answer_limit_s": 60, "sample_limit_s": 200}


class Scene:
    """Two replicas with two requests each; prompt `a` has three samples, `b` two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        time = SimpleNamespace(monotonic=lambda: self.clock.now_s, time=lambda: self.clock.now_s)
        monkeypatch.setattr(run_status, "time", time)
        monkeypatch.setattr(clock_module, "time", time)
        self.engines = ScriptedEngines(self.clock, 2, lambda request: request.prompt[0])
        self.scheduler = RequestScheduler(
            self.engines, lambda number: True, **LIMITS, clock=lambda: self.clock.now_s, wait=self.clock.wait
        )  # type: ignore[arg-type]
        self.position = Position()
        self.counts: list[tuple[str, dict[str, float]]] = []
        monitor: Any = SimpleNamespace(
            position=self.position, count=lambda name, values: self.counts.append((name, values))
        )
        rollout = SimpleNamespace(scheduler=self.scheduler, runner=self.scheduler, num_restarts=0)
        roles: Any = SimpleNamespace(rollout=rollout, weights=SimpleNamespace(version=7))
        config = PPOConfig(
            rollout=RolloutConfig(max_staleness=2),
            trainer=TrainerConfig(total_steps=9, prompts_per_step=4, phase_time_limit_s=400),
        )
        async_rollout: Any = SimpleNamespace(num_finished=lambda: 3)
        self.checkpoints: Any = SimpleNamespace(seconds=0.0, last_step=0)
        self._status = StatusReader(config, roles, monitor, async_rollout, NoRecovery(), self.checkpoints)
        sampling = SamplingParameters(max_new_tokens=200, seed=0)
        lengths = [(20, "a"), (30, "a"), (40, "a"), (150, "b"), (60, "b")]
        requests = [
            GenerationRequest(number, [length], sampling, uid) for number, (length, uid) in enumerate(lengths)
        ]
        self.scheduler.begin(requests, [lambda replica, sample: None] * len(requests))

    def look_at(self, second: float) -> RunStatus:
        while self.scheduler.num_unfinished and self.clock.now_s < second:
            self.scheduler.poll(second - self.clock.now_s)
        self.clock.now_s = second
        return self._status.snapshot()


def test_prompts_and_replicas_are_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    status = scene.look_at(10)  # one request waits, since each replica has two
    assert status.groups == {"waiting": 0, "generating": 2, "finished": 3, "training": 0}
    assert status.oldest == [
        GroupStatus(uid="a", missing=3, where="replica 0", seconds=10.0),
        GroupStatus(uid="b", missing=2, where="replica 1", seconds=10.0),
    ]
    assert [(replica.state, replica.in_flight) for replica in status.replicas] == [("generating", 2)] * 2
    assert (status.weight_version, status.total_steps, status.max_staleness, status.step) == (7, 9, 2, None)
    assert scene.counts == [
        ("prompts", status.groups),
        ("requests", {"replica 0": 2, "replica 1": 2}),
        ("weights", {"version": 7}),
    ]
    status = scene.look_at(70)  # 20, 30, 40 at once; 60 after 20
    assert [(one.uid, one.missing) for one in status.oldest] == [("b", 2)]
    status = scene.look_at(100)
    assert [(replica.state, replica.in_flight, replica.silent_s) for replica in status.replicas] == [
        ("idle", 0, 0.0),
        ("generating", 1, 70.0),
    ]
    assert status.stalled is None


def test_between_two_steps_and_at_the_end_it_names_the_completed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    seen = []
    for running, completed in ((None, 0), (1, 0), (None, 1), (2, 1), (None, 2)):
        scene.position.step = running
        scene.checkpoints.last_step = completed
        seen.append(scene.look_at(10).step)
    assert seen == [None, 1, 1, 2, 2]


def test_shares_and_speeds_are_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.scheduler.poll(0.001)
    position = scene.position
    position.step = 1
    status = scene.look_at(50)
    assert status.groups["training"] == 4
    assert status.trainer_idle == 0.0
    assert status.engines_idle == pytest.approx(0.0, abs=1e-3)
    assert status.tokens_per_s == pytest.approx(90 / 50)
    for second in range(55, 165, 10):
        status = scene.look_at(second)
    assert status.tokens_per_s == pytest.approx(300 / 155)
    position.phases.append("gen")
    position.begun.append(clock_module.Began())

    for second in range(165, 305, 10):
        scene.clock.now_s = second
        status = scene.look_at(second)

    assert (status.trainer_idle, status.engines_idle, status.tokens_per_s) == (1.0, 1.0, 0.0)
    assert status.phases == ["gen"]
    assert status.groups["training"] == 0


def test_what_does_not_move_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    stalled = scene.look_at(140).stalled
    assert stalled is not None
    assert "rollout replica 1 has finished none of its 1 requests for 110 s" in stalled
    assert "prompt b, submitted 140 s ago" in stalled
    assert "After 400 s (trainer.phase_time_limit_s)" in stalled
