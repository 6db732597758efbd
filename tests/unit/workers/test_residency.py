"""Whose turn it is: the moves of actor, reference and engines for every order of phases, on fakes that know what is in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from megarl.controller.futures import RemoteFuture
from megarl.engine.offload import StatePart
from megarl.workers.residency import Residency, TakingTurns

GRADIENTS, OPTIMIZER, PARAMETERS = StatePart.gradients, StatePart.optimizer, StatePart.parameters
EVERYTHING = {GRADIENTS, OPTIMIZER, PARAMETERS}


class Done(RemoteFuture):
    calls = ()

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get(self, timeout: float | None = None) -> list[Any]:
        return self._results


class FakeGroup:
    """Of one rank. It notes the calls that change something in `log`, and refuses what a worker would refuse."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def execute_all_async(self, method: str, *arguments: Any) -> Done:
        return Done([getattr(self, method)(*arguments)])

    def resident_memory_gb(self) -> float:
        return 1.5


class FakeTrainer(FakeGroup):
    def __init__(self, name: str, log: list[str], parts: set[StatePart]) -> None:
        super().__init__(name, log)
        self.parts, self.held = frozenset(parts), set(parts)

    def offload_state(self, parts: Sequence[StatePart]) -> None:
        self._move(self.held & set(parts), "-", self.held.difference_update)

    def restore_state(self, parts: Sequence[StatePart]) -> None:
        self._move((self.parts - self.held) & set(parts), "+", self.held.update)

    def _move(self, parts: set[StatePart] | frozenset[StatePart], sign: str, change: Callable[[set[StatePart]], None]) -> None:
        change(set(parts))
        self.log += [f"{self.name} {sign}{part.value}" for part in sorted(parts)]


class FakeEngine(FakeGroup):
    awake, version = True, None

    def sleep(self) -> None:
        assert self.awake
        self.awake, self.version = False, None
        self.log.append(f"{self.name} sleeps")

    def wake(self) -> None:
        if not self.awake:
            self.awake = True
            self.log.append(f"{self.name} wakes")


@dataclass
class FakeRollout:
    """As workers/rollout.py: it keeps the push for a replica that is started later."""

    log: list[str]
    replicas: list[FakeEngine] = field(default_factory=list)
    push: Any = None

    def update_weights(self, push: Any) -> None:
        self.push = push
        push(self.replicas)

    def sleep(self) -> None:
        for replica in self.replicas:
            replica.sleep()

    def resident_memory_gb(self) -> float:
        return 2.5

    def restart(self, index: int) -> None:
        self.replicas[index] = FakeEngine(f"engine{index}'", self.log)
        self.push([self.replicas[index]])


class World:
    """A run in hybrid. What each phase needs is checked while it runs."""

    def __init__(self, reference: bool = True) -> None:
        self.log: list[str] = []
        self.actor = FakeTrainer("actor", self.log, EVERYTHING)
        self.reference = FakeTrainer("reference", self.log, {PARAMETERS}) if reference else None
        self.rollout = FakeRollout(self.log)
        self.residency = TakingTurns(self.actor, self.reference)  # type: ignore[arg-type]
        self.version = 0
        self.residency.make_room()
        self.rollout.replicas = [FakeEngine("engine0", self.log), FakeEngine("engine1", self.log)]

    def taken(self) -> list[str]:
        taken, self.log[:] = list(self.log), []
        return taken

    def send(self) -> None:
        self.version += 1
        version = self.version

        def push(replicas: Sequence[FakeEngine]) -> None:
            assert self.actor.held == {PARAMETERS}
            assert self.reference is None or not self.reference.held
            for replica in replicas:
                assert replica.awake
                replica.version = version  # type: ignore[assignment]
                self.log.append(f"{replica.name} v{version}")

        self.residency.send(self.rollout, push)  # type: ignore[arg-type]

    def generate(self) -> None:
        self.residency.before_generate()
        assert not self.actor.held
        assert self.reference is None or not self.reference.held
        assert [replica.version for replica in self.rollout.replicas] == [self.version, self.version]

    def score(self) -> None:
        self.residency.before_scoring()
        self._engines_sleep()
        assert PARAMETERS in self.actor.held
        assert self.reference is None or self.reference.held

    def update(self) -> None:
        self.residency.before_update()
        self._engines_sleep()
        assert self.actor.held == EVERYTHING

    def _engines_sleep(self) -> None:
        assert not any(replica.awake for replica in self.rollout.replicas)


def test_the_first_weights_find_the_trainer_away() -> None:
    world = World()
    assert world.taken() == ["actor -gradients", "actor -optimizer", "actor -parameters", "reference -parameters"]
    world.send()
    assert world.taken() == ["actor +parameters", "engine0 v1", "engine1 v1", "actor -parameters"]
    world.generate()
    assert world.taken() == []


def test_a_step_that_trains_the_actor() -> None:
    world = World()
    world.send()
    world.generate()
    world.taken()
    world.score()
    assert world.taken() == ["engine0 sleeps", "engine1 sleeps", "actor +parameters", "reference +parameters"]
    world.score()  # the reference
    assert world.taken() == []
    world.update()
    assert world.taken() == ["actor +gradients", "actor +optimizer"]
    world.send()
    assert world.taken() == [
        *("actor -gradients", "actor -optimizer", "reference -parameters", "engine0 wakes", "engine1 wakes"),
        *("engine0 v2", "engine1 v2", "actor -parameters"),
    ]
    world.generate()  # validation
    world.generate()
    assert world.taken() == []


def test_a_step_of_critic_warm_up_sends_the_same_weights_again_and_leaves_the_optimizer_away() -> None:
    world = World()
    world.send()
    for _ in range(2):
        world.generate()
        world.score()
        world.taken()
        world.generate()
        assert world.taken() == [
            *("reference -parameters", "engine0 wakes", "engine1 wakes", "engine0 v1", "engine1 v1", "actor -parameters"),
        ]


def test_an_engine_that_is_started_anew_gets_weights_that_are_away() -> None:
    world = World()
    world.send()
    world.generate()
    world.taken()
    world.rollout.restart(1)
    assert world.taken() == ["actor +parameters", "engine1' v1", "actor -parameters"]
    world.generate()
    world.score()
    world.update()
    world.send()
    world.generate()


@pytest.mark.parametrize("generated", [True, False])
def test_weights_are_there_to_be_saved_whoever_has_the_turn(generated: bool) -> None:
    world = World()
    world.send()
    if not generated:
        world.score()
    world.taken()
    with world.residency.actor_parameters():
        assert PARAMETERS in world.actor.held
    assert world.taken() == (["actor +parameters", "actor -parameters"] if generated else [])


def test_a_push_that_fails_can_be_tried_again() -> None:
    world = World()
    failures = [RuntimeError("an engine died")]

    class Mending(FakeRollout):
        def update_weights(self, push: Any) -> None:
            with pytest.raises(RuntimeError, match="an engine died"):
                push(self.replicas)
            super().update_weights(push)

    world.rollout = Mending(world.log, world.rollout.replicas)

    def push(replicas: Sequence[FakeEngine]) -> None:
        assert PARAMETERS in world.actor.held
        if failures:
            raise failures.pop()
        for replica in replicas:
            replica.version = 0  # type: ignore[assignment]

    world.residency.send(world.rollout, push)  # type: ignore[arg-type]
    world.generate()


def test_without_a_reference() -> None:
    world = World(reference=False)
    world.send()
    world.generate()
    world.score()
    world.update()
    world.send()
    world.generate()


def test_memory_is_reported_for_both_modes() -> None:
    world = World()
    world.send()
    assert world.residency.metrics() == {}
    world.score()
    assert world.residency.metrics() == {"memory/actor_rss_gb/rollout": 1.5, "memory/rollout_rss_gb/rollout": 2.5}
    world.generate()
    assert {key for key in world.residency.metrics() if key.endswith("/training")} == {
        "memory/actor_rss_gb/training",
        "memory/rollout_rss_gb/training",
    }


def test_roles_with_devices_of_their_own_are_left_alone() -> None:
    pushed: list[Any] = []
    rollout = FakeRollout([], [FakeEngine("engine", [])])
    residency = Residency()
    residency.send(rollout, pushed.append)  # type: ignore[arg-type]
    residency.before_generate()
    residency.before_scoring()
    residency.before_update()
    with residency.actor_parameters():
        pass
    assert pushed == [rollout.replicas]
    assert residency.metrics() == {}
