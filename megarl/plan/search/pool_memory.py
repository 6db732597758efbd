"""The memory of pools before a placement is planned: with the parts of the memory plan, and equal to it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megarl.plan.placement.activations import RoleMemory
from megarl.plan.placement.memory import PlacedMemory
from megarl.plan.placement.model_state import Usage
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan, ProcessPlan
from megarl.plan.placement.requests import base_roles
from megarl.plan.search.placements import Partition
from megarl.plan.search.space import Space, roles_of

# The bytes of a unit on the devices of its pool, by pipeline stage and phase, and the number of devices of a
# stage. Stages follow each other from the pool's first device.
MemoryShare = tuple[tuple[tuple[int, ...], ...], int]


def skeleton(space: Space, partition: Partition) -> PlacementPlan:
    """Return a placement with the pools of a partition that have one device each.

    What is in memory in each phase depends only on which roles share devices, so it decides it for all sizes.
    """
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


def share_of_models(
    placed: PlacedMemory, memory: Mapping[str, Sequence[RoleMemory]], per_stage: int
) -> MemoryShare:
    """Return the bytes of a unit's models, from the memory of each role by stage."""
    totals = tuple(
        tuple(
            sum(placed.of_model(role, each, phase).total for role, each in zip(memory, stage, strict=True))
            for phase in placed.phases
        )
        for stage in zip(*memory.values(), strict=True)
    )
    return totals, per_stage


def share_of_engines(placed: PlacedMemory, usage: Usage, num_devices: int) -> MemoryShare:
    """Return the bytes of the engines, which have the first `num_devices` devices of their pool."""
    return (tuple(placed.of_engine(usage, phase).total for phase in placed.phases),), num_devices


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
    return max(
        max(each.state.parameters + each.score, each.state.total + max(each.train, each.step))
        for role, stages in memory.items()
        if role not in bases
        for each in stages
    )
