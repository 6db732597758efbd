"""Test the memory plan against the moves of a run: the contents of memory in each phase, with fakes that
track their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from megarl.config.schema import AlgorithmConfig, KLConfig, KLWhere, PlacementStrategy, PPOConfig, Transport
from megarl.engine.offload import StatePart
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.model_state import Usage
from megarl.plan.placement.plan import plan_placement
from tests.unit.plan.placement.test_memory import EVERY_ROLE, config
from tests.unit.roles.test_offload_schedule import EngineDiedError, FakeEngine, FakeTrainer, World

RESIDENT = [each.name for each in fields(Usage) if each.name != "activations"]
SHARED = {
    "roles": {"actor": "all", "reference": "all", "critic": "all", "rollout": "all"},
    "pools": {"all": [4]},
}
TRAINERS_SHARE = {
    "roles": {"actor": "train", "reference": "train", "critic": "train", "rollout": "engines"},
    "pools": {"train": [4], "engines": [4]},
}


class BufferedTrainer(FakeTrainer):
    """Trainer like a Megatron worker: the buffers of a weight sync stay until a part of its state is
    offloaded."""

    has_buffers = False

    def offload_state(self, parts: Sequence[StatePart]) -> None:
        self.has_buffers = False
        super().offload_state(parts)


class WatchedWorld(World):
    """World that compares memory with the plan in every phase and every weight sync."""

    def __init__(self, run: PPOConfig, transport: Transport) -> None:
        super().__init__(run)
        self.transport = transport
        for model in self.models.values():
            model.__class__ = BufferedTrainer

        for engine in self.replicas.groups:
            # an engine that shares devices frees its cache at startup
            engine.has_cache = not self.schedule.engines_move

        self.engines_have_buffers = False
        self.planned: dict[str, dict[str, set[str]]] = {}

        for device in plan_memory(run, plan_placement(run), EVERY_ROLE):
            for phase, usages in device.phases.items():
                for role, usage in usages.items():
                    found = {name for name in RESIDENT if getattr(usage, name)}
                    # on every device of the role
                    assert self.planned.setdefault(phase, {}).setdefault(role, found) == found

        self.seen = set[str]()
        self.is_first_push = True

    def push(self, replicas: Mapping[int, FakeEngine], version: int) -> Any:
        keeps = self.transport is not Transport.folder
        self.actor.has_buffers = keeps  # type: ignore[attr-defined]
        self.engines_have_buffers = self.transport is Transport.group
        report = super().push(replicas, version)
        self.is_first_push = False
        return report

    def check_beside(self, phase: str) -> None:
        super().check_beside(phase)
        self.seen.add(phase)
        planned = {
            role: parts
            for role, parts in self.planned[phase].items()
            if role in self.models or role == "rollout"
        }

        if self.transport is Transport.folder and phase == "update_weights":
            # while files are written, neither before nor after
            planned = {role: parts - {"buckets"} for role, parts in planned.items()}

        resident = self.resident()
        if self.is_first_push:  # models that have not computed yet may still be offloaded
            assert all(parts <= planned[role] for role, parts in resident.items()), phase
        else:
            assert resident == planned, phase

    def resident(self) -> dict[str, set[str]]:
        found = {role: {part.value for part in model.held} for role, model in self.models.items()}
        found["actor"] |= {"buckets"} if self.actor.has_buffers else set()  # type: ignore[attr-defined]
        found["rollout"] = set()

        for engine in self.replicas.groups:
            found["rollout"] |= {"parameters"} if engine.awake else set()
            found["rollout"] |= {"kv_cache"} if engine.awake and engine.has_cache else set()

        found["rollout"] |= {"buckets"} if found["rollout"] and self.engines_have_buffers else set()
        return found


def run_of(strategy: PlacementStrategy, transport: Transport, **placement: Any) -> PPOConfig:
    run = config(strategy, **placement)
    algorithm = AlgorithmConfig(kl=KLConfig(where=KLWhere.reward))
    return replace(run, algorithm=algorithm, resharding=replace(run.resharding, transport=transport))


CASES = [
    pytest.param(PlacementStrategy.hybrid, Transport.device, {}, id="hybrid-device"),
    pytest.param(PlacementStrategy.hybrid, Transport.folder, {}, id="hybrid-folder"),
    pytest.param(PlacementStrategy.fully_collocate, Transport.device, {}, id="fully_collocate-device"),
    pytest.param(PlacementStrategy.custom, Transport.device, SHARED, id="custom-device"),
    pytest.param(PlacementStrategy.split_collocate, Transport.group, {}, id="split_collocate-group"),
    pytest.param(PlacementStrategy.stand_alone, Transport.group, {}, id="stand_alone-group"),
    pytest.param(PlacementStrategy.stand_alone, Transport.folder, {}, id="stand_alone-folder"),
    pytest.param(PlacementStrategy.custom, Transport.group, TRAINERS_SHARE, id="custom-group"),
]


@pytest.mark.parametrize(("strategy", "transport", "placement"), CASES)
def test_memory_in_every_phase_is_what_the_plan_says(
    strategy: PlacementStrategy, transport: Transport, placement: dict[str, Any]
) -> None:
    world = WatchedWorld(run_of(strategy, transport, **placement), transport)
    world.send()
    world.generate()  # validation
    for _ in range(2):
        world.step()
    assert world.seen == {
        "gen",
        "old_log_prob",
        "ref",
        "values",
        "update_critic",
        "update_actor",
        "update_weights",
    }


@pytest.mark.parametrize(("strategy", "transport", "placement"), CASES)
def test_a_replica_restarted_in_generation_keeps_the_plan(
    strategy: PlacementStrategy, transport: Transport, placement: dict[str, Any]
) -> None:
    world = WatchedWorld(run_of(strategy, transport, **placement), transport)
    world.send()
    world.step()
    world.generate()
    world.replicas.replace({1: EngineDiedError()})
    world.replicas.groups[1].has_cache = not world.schedule.engines_move
    world.weights.settle()
    world.check_beside("gen")
    world.generate()
    world.step()
