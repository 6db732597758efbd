"""The memory of pools before a placement is planned: with the parts of the memory plan, and equal to it.

What is in memory in each phase depends only on which roles share devices. So one small placement for each
partition, with one device for each pool, decides it for all sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megarl.models.architecture import Architecture
from megarl.plan.placement.dataflow import ENGINE, Item, Phase
from megarl.plan.placement.memory import RoleMemory, Usage
from megarl.plan.placement.offload_plan import OffloadPlan
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan, ProcessPlan
from megarl.plan.placement.requests import base_roles
from megarl.plan.placement.transport import sync_buffers
from megarl.plan.search.placements import Partition
from megarl.plan.search.space import ROLLOUT, Space, roles_of

# The bytes of a unit on the devices of its pool, by pipeline stage and phase, and the number of devices of a
# stage. Stages follow each other from the pool's first device.
MemoryShare = tuple[tuple[tuple[int, ...], ...], int]


def skeleton(space: Space, partition: Partition) -> PlacementPlan:
    """Return a placement with the pools of a partition that have one device each."""
    roles = {unit: [role.name for role in roles_of(space.config, unit)] for unit in space.units}
    groups = [
        _group(str(number), role, (number,))
        for number, units in enumerate(partition)
        for unit in units
        for role in roles.get(unit, (unit,))
    ]

    return PlacementPlan(
        strategy=space.config.placement.strategy,
        num_nodes=1,
        devices_per_node=len(partition),
        groups=(*groups, _group("reward", "reward", ())),
        bases=tuple(base_roles(space.config).items()),
    )


def _group(pool: str, role: str, devices: tuple[int, ...]) -> GroupPlan:
    process = ProcessPlan(pool=pool, group=role, rank=0, roles=(role,), node=0, devices=devices)
    return GroupPlan(name=role, pool=pool, roles=(role,), processes=(process,), reservation=role)


class PoolMemory:
    """The memory of the units of one partition.

    Args:
        partition: The units of each pool.

    Raises:
        ConfigError: The configured transport of weights does not work in this placement.
    """

    def __init__(self, space: Space, partition: Partition, architectures: Mapping[str, Architecture]) -> None:
        self.plan = skeleton(space, partition)
        turns = OffloadPlan(self.plan)
        self._phases = [phase for phase in turns.phases if phase.roles]
        self._held = turns.held()
        self._engines_move = turns.engines_move
        self._buffers = sync_buffers(space.config, self.plan, turns, architectures)

    def of_models(self, memory: Mapping[str, Sequence[RoleMemory]], per_stage: int) -> MemoryShare:
        """Return the bytes of a unit's models, from the memory of each role by stage."""
        stages = zip(*memory.values(), strict=True)
        totals = tuple(
            tuple(
                sum(self._of_model(role, each, phase) for role, each in zip(memory, stage, strict=True))
                for phase in self._phases
            )
            for stage in stages
        )
        return totals, per_stage

    def _of_model(self, role: str, memory: RoleMemory, phase: Phase) -> int:
        usage = memory.usage(role, phase, self._held[phase.name])
        return usage.total + self._buffers.in_phase(phase.name, role, memory.state.parameters)

    def of_engines(self, usage: Usage, num_devices: int) -> MemoryShare:
        """Return the bytes of the engines, which have the first `num_devices` devices of their pool."""
        totals = []
        for phase in self._phases:
            if Item(ROLLOUT, ENGINE) not in self._held[phase.name]:
                totals.append(0)
                continue
            # Engines that share their devices have no cache until their weights are new.
            has_no_cache = phase.name == "update_weights" and self._engines_move
            buckets = self._buffers.in_phase(phase.name, ROLLOUT, usage.parameters)
            totals.append(usage.total - usage.kv_cache * has_no_cache + buckets)
        return (tuple(totals),), num_devices


def peak_of_pool(shares: Sequence[MemoryShare]) -> int:
    """Return the bytes of the fullest device of a pool that these units share."""
    if len(shares) == 1:
        return max(map(max, shares[0][0]))
    # Between two of these devices, the stages of all units are the same.
    starts = {stage * per_stage for totals, per_stage in shares for stage in range(len(totals))}
    return max(_most_at(shares, start) for start in starts)


def _most_at(shares: Sequence[MemoryShare], device: int) -> int:
    stages = [
        totals[device // per_stage] for totals, per_stage in shares if device // per_stage < len(totals)
    ]
    return max(sum(of_phase) for of_phase in zip(*stages, strict=True))


def least_bytes(memory: Mapping[str, Sequence[RoleMemory]], bases: Collection[str]) -> int:
    """Return the bytes that a unit needs on a device in every placement, however much is offloaded.

    Args:
        memory: The memory of each role by stage.
        bases: Roles whose model is another role's, which have no state of their own.
    """
    return max(_least(each) for role, stages in memory.items() if role not in bases for each in stages)


def _least(memory: RoleMemory) -> int:
    state, work = memory
    return max(state.parameters + work.score, state.total + max(work.train, work.step))
