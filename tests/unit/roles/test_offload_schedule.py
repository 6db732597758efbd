"""Test the offload schedule: the moves of actor, reference and engines for every order of phases, with fakes
that track their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from megarl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    KLConfig,
    KLWhere,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
)
from megarl.controller.futures import RemoteFuture
from megarl.controller.worker import RemoteMethod
from megarl.engine.offload import StatePart
from megarl.plan.placement.dataflow import Item, OffloadPlan
from megarl.plan.placement.plan import plan_placement
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.rollout.driver.replicas import unshared
from megarl.rollout.driver.rollout_weights import RolloutWeights

GRADIENTS = StatePart.gradients
OPTIMIZER = StatePart.optimizer
PARAMETERS = StatePart.parameters
EVERYTHING = {GRADIENTS, OPTIMIZER, PARAMETERS}


class Done(RemoteFuture):
    calls = ()

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get(self, timeout: float | None = None) -> list[Any]:
        return self._results


class FakeGroup:
    """Stub for a group of one rank. It records state-changing calls in `log`, and refuses what a worker would
    refuse."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def call(self, method: RemoteMethod, *arguments: Any) -> Any:
        results = [getattr(self, method.name)(*arguments)]
        return results if method.blocking else Done(results)

    def resident_memory_gb(self) -> float:
        return 1.5


class FakeTrainer(FakeGroup):
    def __init__(self, name: str, log: list[str], parts: set[StatePart]) -> None:
        super().__init__(name, log)
        self.parts = frozenset(parts)
        self.held = set(parts)

    def offload_state(self, parts: Sequence[StatePart]) -> None:
        self._move(self.held & set(parts), "-", self.held.difference_update)

    def restore_state(self, parts: Sequence[StatePart]) -> None:
        self._move((self.parts - self.held) & set(parts), "+", self.held.update)

    def _move(
        self,
        parts: set[StatePart] | frozenset[StatePart],
        sign: str,
        change: Callable[[set[StatePart]], None],
    ) -> None:
        change(set(parts))
        self.log += [f"{self.name} {sign}{part.value}" for part in sorted(parts)]


class FakeEngine(FakeGroup):
    awake = True
    version = None
    has_cache = True

    def sleep(self) -> None:
        assert self.awake
        self.awake = False
        self.has_cache = False
        self.version = None
        self.log.append(f"{self.name} sleeps")

    def wake(self) -> None:
        if not self.awake:
            self.awake = True
            self.log.append(f"{self.name} wakes")

    def wake_cache(self) -> None:
        if not self.has_cache:
            self.has_cache = True
            self.log.append(f"{self.name} has its cache")


class FakeReplicas:
    """Stub for Replicas in rollout/driver/replicas.py."""

    def __init__(self, log: list[str], count: int = 2) -> None:
        self.exclusive = unshared
        self.log = log
        self.groups = [FakeEngine(f"engine{number}", log) for number in range(count)]
        self.starting: set[int] = set()

    @property
    def all(self) -> dict[int, FakeEngine]:
        return dict(enumerate(self.groups))

    def accept(self, replicas: Mapping[int, FakeEngine], version: int) -> dict[int, Exception]:
        assert all(replica.version == version for replica in replicas.values())
        self.starting -= replicas.keys()
        return {}

    def sleep(self) -> None:
        for replica in self.groups:
            replica.sleep()

    def wake(self, replicas: Mapping[int, FakeEngine]) -> dict[int, Exception]:
        for replica in replicas.values():
            replica.wake()
        return {}

    def wake_cache(self, replicas: Mapping[int, FakeEngine]) -> dict[int, Exception]:
        for replica in replicas.values():
            replica.wake_cache()
        return {}

    def resident_memory_gb(self) -> float:
        return 2.5

    def replace(self, lost: Mapping[int, Exception]) -> None:
        for number in lost:
            self.groups[number] = FakeEngine(f"engine{number}'", self.log)
            self.starting.add(number)


class EngineDiedError(Exception):
    """The reason why a replica is lost in these tests."""


def placed(strategy: PlacementStrategy, reference: bool = True, **placement: Any) -> PPOConfig:
    """Place an actor of two ranks, so that the critic, with one rank, has another layout and its own
    process."""
    return PPOConfig(
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2)),
        algorithm=AlgorithmConfig(kl=KLConfig(where=KLWhere.reward if reference else KLWhere.none)),
        placement=PlacementConfig(strategy=strategy, **placement),
    )


class World:
    """A run. It checks, while each phase runs, what the phase needs and what must be offloaded."""

    def __init__(self, config: PPOConfig | None = None) -> None:
        self.log: list[str] = []
        placement = plan_placement(config or placed(PlacementStrategy.hybrid))
        self.plan = OffloadPlan(placement)
        self.models = {
            role: FakeTrainer(role, self.log, {PARAMETERS} if role == "reference" else EVERYTHING)
            for role in placement.roles
            if role not in ("reward", "rollout")
        }
        self.actor, self.reference = self.models["actor"], self.models.get("reference")
        for role, model in self.models.items():
            model.held -= {StatePart(part) for part in self.plan.offloaded_at_first(role)}
        self.replicas = FakeReplicas(self.log)
        self.schedule = OffloadSchedule(self.plan, self.models, self.replicas)  # type: ignore[arg-type]
        self.weights = RolloutWeights(self, self.replicas, self.schedule)  # type: ignore[arg-type]
        self.failures: list[Exception] = []

    def push(self, replicas: Mapping[int, FakeEngine], version: int) -> tuple[None, dict[int, Exception]]:
        """Sync weights, with the interface of WeightSync. `failures` are those of the first replica in the
        next syncs."""
        assert PARAMETERS in self.actor.held
        self.check_beside("update_weights")
        lost = {min(replicas): self.failures.pop()} if self.failures else {}

        for number, replica in replicas.items():
            if number not in lost:
                assert replica.awake
                replica.version = version  # type: ignore[assignment]
                self.log.append(f"{replica.name} v{version}")

        return None, lost

    def taken(self) -> list[str]:
        taken = list(self.log)
        self.log[:] = []
        return taken

    def send(self) -> None:
        self.weights.push()

    def generate(self) -> None:
        self.weights.bring_in()
        self.check_beside("gen")
        self.weights.settle()
        assert [(replica.version, replica.has_cache) for replica in self.replicas.groups] == [
            (self.weights.version, True)
        ] * 2

    def run(self, phase: str) -> list[Any]:
        moves = self.schedule.before(phase)
        self.check_beside(phase)
        return moves

    def score(self) -> None:
        for phase in ("old_log_prob", *(["ref"] if self.reference else [])):
            self.run(phase)

    def step(self) -> None:
        self.generate()
        self.score()

        if "critic" in self.models:
            self.run("values")
            self.run("update_critic")

        self.run("update_actor")
        self.send()

    def check_beside(self, phase: str) -> None:
        """Check that everything needed is loaded, and everything that had to leave is offloaded."""
        held = {Item(role, part.value) for role, model in self.models.items() for part in model.held}
        held |= (
            {Item("rollout", "engine")} if any(replica.awake for replica in self.replicas.groups) else set()
        )
        assert self.plan.phase(phase).needs <= held | {Item("reward", "parameters")}
        assert not held & self.plan.leaving(phase)


def test_the_first_weights_find_the_trainer_away() -> None:
    world = World()
    assert not world.actor.held
    assert world.reference is not None
    assert not world.reference.held
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
    world.score()
    assert world.taken() == []
    world.run("update_actor")  # the reference is not needed again before the engines are
    assert world.taken() == ["reference -parameters", "actor +gradients", "actor +optimizer"]
    world.send()
    assert world.taken() == [
        *("actor -gradients", "actor -optimizer", "engine0 wakes", "engine1 wakes"),
        *("engine0 v2", "engine1 v2", "actor -parameters"),
        *("engine0 has its cache", "engine1 has its cache"),
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
            *(
                "reference -parameters",
                "engine0 wakes",
                "engine1 wakes",
                "engine0 v1",
                "engine1 v1",
                "actor -parameters",
            ),
            *("engine0 has its cache", "engine1 has its cache"),
        ]


def test_a_replica_restarted_in_generation_waits_while_others_have_their_caches() -> None:
    """The actor's parameters and IPC buffers do not fit next to a full cache, so the other replica finishes
    the generation alone."""
    world = World()
    world.send()
    world.generate()
    world.taken()
    world.replicas.replace({1: EngineDiedError()})
    assert not world.weights.can_readmit()
    world.weights.settle()
    assert world.replicas.starting == {1}
    assert world.taken() == []
    world.generate()  # validation, which follows without a weight sync
    assert world.taken() == [
        *("engine0 sleeps", "engine1' sleeps", "actor +parameters", "engine0 wakes", "engine1' wakes"),
        *(
            "engine0 v1",
            "engine1' v1",
            "actor -parameters",
            "engine0 has its cache",
            "engine1' has its cache",
        ),
    ]
    world.replicas.replace({0: EngineDiedError()})
    world.score()
    world.run("update_actor")
    world.send()
    assert not world.replicas.starting
    world.step()


def test_a_replica_is_admitted_in_generation_when_no_other_has_a_cache() -> None:
    world = World()
    world.send()
    world.generate()
    world.taken()
    world.replicas.replace({0: EngineDiedError(), 1: EngineDiedError()})
    world.weights.settle()
    assert world.replicas.starting == {1}
    assert world.taken() == ["actor +parameters", "engine0' v1", "actor -parameters"]


def test_a_replica_restarted_in_generation_is_admitted_at_once_on_devices_of_its_own() -> None:
    world = World(placed(PlacementStrategy.stand_alone))
    world.send()
    world.generate()
    world.taken()
    world.replicas.replace({1: EngineDiedError()})
    world.weights.settle()
    assert not world.replicas.starting
    assert world.taken() == ["engine1' v1"]


@pytest.mark.parametrize("generated", [True, False])
def test_weights_are_restored_to_be_saved_during_generation(generated: bool) -> None:
    world = World()
    world.send()
    if not generated:
        world.score()
    world.taken()
    came_in = world.schedule.bring_in_actor()
    assert came_in == generated
    assert PARAMETERS in world.actor.held
    if came_in:
        world.schedule.take_out_actor()
    assert world.taken() == (["actor +parameters", "actor -parameters"] if generated else [])


def test_a_replica_that_is_lost_in_a_push_gets_weights_before_the_next_generation() -> None:
    world = World()
    world.failures = [EngineDiedError()]
    world.send()
    assert world.taken() == ["actor +parameters", "engine1 v1", "actor -parameters"]
    world.generate()
    assert world.taken() == [
        *("engine0' sleeps", "engine1 sleeps", "actor +parameters", "engine0' wakes", "engine1 wakes"),
        *(
            "engine0' v1",
            "engine1 v1",
            "actor -parameters",
            "engine0' has its cache",
            "engine1 has its cache",
        ),
    ]


def test_without_a_reference() -> None:
    world = World(placed(PlacementStrategy.hybrid, reference=False))
    world.send()

    for _ in range(2):
        world.generate()
        world.score()
        world.run("update_actor")
        world.send()


def test_all_on_the_same_devices() -> None:
    world = World(placed(PlacementStrategy.fully_collocate))
    world.send()
    world.step()
    world.taken()
    world.generate()
    assert world.taken() == []
    world.score()
    world.run("values")
    assert world.taken() == [
        *("engine0 sleeps", "engine1 sleeps", "actor +parameters", "reference +parameters"),
        *("reference -parameters", "critic +parameters"),
    ]
    world.run("update_critic")  # the actor's parameters stay: they are needed before the engines are
    assert world.taken() == ["critic +gradients", "critic +optimizer"]
    world.run("update_actor")
    assert world.taken() == [
        *("critic -gradients", "critic -optimizer", "critic -parameters"),
        *("actor +gradients", "actor +optimizer"),
    ]
    world.send()
    assert world.taken() == [
        *("actor -gradients", "actor -optimizer", "engine0 wakes", "engine1 wakes"),
        *("engine0 v3", "engine1 v3", "actor -parameters"),
        *("engine0 has its cache", "engine1 has its cache"),
    ]


def test_what_another_process_does_on_the_devices_has_ended_before_a_turn_begins() -> None:
    world = World(placed(PlacementStrategy.fully_collocate))
    world.send()
    world.generate()

    class Late(Done):
        waited = False

        def get(self, timeout: float | None = None) -> list[Any]:
            self.waited = True
            return super().get(timeout)

    scoring = Late([])
    fused = Late([])
    world.schedule.run("old_log_prob", lambda: [fused], list)
    world.run("ref")  # in the actor's process, where it queues
    assert not fused.waited
    world.run("values")
    assert fused.waited
    world.schedule.run("values", lambda: [scoring], list)
    world.run("update_actor")
    assert scoring.waited


def test_actor_and_critic_with_engines_elsewhere_keep_their_parameters() -> None:
    roles = {"actor": "train", "reference": "train", "critic": "train", "rollout": "engines"}
    world = World(placed(PlacementStrategy.custom, roles=roles, pools={"train": [2], "engines": [2]}))
    world.send()
    assert world.taken() == ["engine0 v1", "engine1 v1"]

    for number in (2, 3):
        world.step()
        assert world.taken() == [
            *("critic +gradients", "critic +optimizer", "critic -gradients", "critic -optimizer"),
            *("actor +gradients", "actor +optimizer", "actor -gradients", "actor -optimizer"),
            *(f"engine0 v{number}", f"engine1 v{number}"),
        ]


@pytest.mark.parametrize("strategy", [PlacementStrategy.split_collocate, PlacementStrategy.stand_alone])
def test_roles_with_devices_of_their_own_never_move(strategy: PlacementStrategy) -> None:
    world = World(placed(strategy))
    world.send()
    for _ in range(2):
        world.step()
    assert not [entry for entry in world.taken() if "+" in entry or "-" in entry or "sleeps" in entry]
    assert world.schedule.metrics() == {}


def test_memory_is_reported_for_both_modes() -> None:
    world = World()
    world.send()
    assert world.schedule.metrics() == {}
    world.score()
    assert world.schedule.metrics() == {
        "memory/actor_rss_gb/rollout": 1.5,
        "memory/rollout_rss_gb/rollout": 2.5,
    }
    world.generate()
    assert {key for key in world.schedule.metrics() if key.endswith("/training")} == {
        "memory/actor_rss_gb/training",
        "memory/rollout_rss_gb/training",
    }


def test_the_push_waits_for_the_actors_update_and_raises_its_failure() -> None:
    world = World(placed(PlacementStrategy.stand_alone))

    class Failed(Done):
        def get(self, timeout: float | None = None) -> list[Any]:
            raise EngineDiedError("in the update")

    world.schedule.run("update_actor", lambda: [Failed([])], list)
    with pytest.raises(EngineDiedError, match="in the update"):
        world.weights.push()
    assert (world.weights.version, world.taken()) == (0, [])


def test_without_a_plan_nothing_moves() -> None:
    schedule = OffloadSchedule()
    assert schedule.before("values") == []
    schedule.before_push()
    schedule.after_push()
    assert not schedule.bring_in_actor()
    assert (schedule.engines_move, schedule.engines_are_offloaded, schedule.metrics()) == (False, False, {})
