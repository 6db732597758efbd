"""Placements of a run: which units share a pool of devices, and how many devices each pool has.

The units are divided into pools in every way (HybridFlow, Sheng et al. 2024, arXiv 2409.19256, algorithm 1),
and the devices into pools in steps that grow with the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from megarl.config.schema import PlacementConfig, PlacementStrategy
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan, ProcessPlan
from megarl.plan.placement.requests import base_roles, pool_requests
from megarl.plan.search.space import ROLLOUT, Space, units_of

Partition = tuple[tuple[str, ...], ...]  # the units of each pool, with the engines as a unit
_NAMED = (
    PlacementStrategy.hybrid,
    PlacementStrategy.split_collocate,
    PlacementStrategy.fully_collocate,
    PlacementStrategy.stand_alone,
)
_MOST_PARTS = 16  # of the devices, in a search over pools


class Pool(NamedTuple):
    """A pool of devices.

    Attributes:
        units: The units that share its devices, and `rollout` for the engines.
        on_nodes: The number of its devices on each node, without nodes after its last one.
    """

    units: tuple[str, ...]
    on_nodes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return sum(self.on_nodes)

    @property
    def granule(self) -> int:
        """The largest size of groups that fill its devices on every node."""
        return gcd(*self.on_nodes)

    def num_engines(self, size: int, devices_per_node: int) -> int:
        """Return the most engines of a size that fit, each on one node or on whole nodes."""
        if size <= devices_per_node:
            return sum(count // size for count in self.on_nodes)
        whole = sum(count == devices_per_node for count in self.on_nodes)
        return whole * devices_per_node // size if size % devices_per_node == 0 else 0


def partitions(space: Space, max_staleness: int) -> list[Partition]:
    """Return the ways to divide the units into pools.

    Engines that generate ahead of training have a pool of their own. A pinned placement leaves one way.
    """
    found = [tuple(map(tuple, each)) for each in _set_partitions([*space.units, ROLLOUT])]
    if max_staleness:
        found = [each for each in found if (ROLLOUT,) in each]
    if space.is_pinned("placement.roles") or space.is_pinned("placement.strategy"):
        found = [each for each in found if _is_configured(space, each)]
    return found


def _set_partitions(items: list[str]) -> Iterator[list[list[str]]]:
    if not items:
        yield []
        return
    *others, last = items
    for smaller in _set_partitions(others):
        for index in range(len(smaller)):
            yield [*smaller[:index], [*smaller[index], last], *smaller[index + 1 :]]
        yield [*smaller, [last]]


def device_splits(space: Space, partition: Partition) -> list[tuple[Pool, ...]]:
    """Return the ways to divide all devices among the pools of a partition, one node after the other."""
    placement = space.config.placement
    if space.is_pinned("placement.pools") and placement.pools:
        return [tuple(Pool(units, tuple(placement.pools[placement.roles[units[0]]])) for units in partition)]
    step = _step(space)
    return [
        _placed(space, partition, [step * count for count in counts])
        for counts in _compositions(space.num_devices // step, len(partition))
    ]


def _step(space: Space) -> int:
    """Return the smallest number of devices by which pools differ.

    It is 1 on a node, half a node on some nodes, and a sixteenth of a large cluster in whole nodes.
    """
    node = space.devices_per_node
    if space.num_nodes == 1:
        return 1
    sizes = [max(1, node // 2), *(node * count for count in range(1, space.num_nodes + 1))]
    return next(
        size for size in sizes if space.num_devices % size == 0 and space.num_devices // size <= _MOST_PARTS
    )


def _compositions(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `total` as a sum of `count` positive numbers."""
    if count == 1:
        yield (total,)
        return
    for first in range(1, total - count + 2):
        for others in _compositions(total - first, count - 1):
            yield (first, *others)


def _placed(space: Space, partition: Partition, sizes: Sequence[int]) -> tuple[Pool, ...]:
    pools = []
    start = 0

    for units, size in zip(partition, sizes, strict=True):
        end = start + size
        node = space.devices_per_node
        # The pool's range of devices overlaps with that of each node by this many.
        on_nodes = tuple(
            max(0, min(end, (number + 1) * node) - max(start, number * node))
            for number in range(-(-end // node))
        )
        pools.append(Pool(units, on_nodes))
        start = end

    return tuple(pools)


def placement_of(space: Space, pools: Sequence[Pool]) -> PlacementConfig:
    """Return the section `placement` for pools: with the name of a strategy if there is one."""
    placement = replace(
        space.config.placement, num_nodes=space.num_nodes, devices_per_node=space.devices_per_node
    )
    if space.is_pinned("placement.pools") and placement.pools:
        return placement

    strategy = _strategy(space, tuple(pool.units for pool in pools))
    if strategy is not PlacementStrategy.custom:
        return replace(placement, strategy=strategy, roles={}, pools={})
    return replace(
        placement,
        strategy=strategy,
        roles={role: pool.units[0] for pool in pools for role in _roles(space, pool.units)},
        pools={pool.units[0]: list(pool.on_nodes) for pool in pools},
    )


def _roles(space: Space, units: Sequence[str]) -> list[str]:
    names = [role.name for unit, roles in units_of(space.config).items() if unit in units for role in roles]
    return [*names, *([ROLLOUT] if ROLLOUT in units else [])]


def _strategy(space: Space, partition: Partition) -> PlacementStrategy:
    """Return the strategy with these pools: the configured one if possible."""
    pools = {frozenset(_roles(space, units)) for units in partition}
    fitting = [strategy for strategy in _NAMED if _pools_of(space, strategy) == pools]
    configured = space.config.placement.strategy
    if configured in fitting or configured is PlacementStrategy.custom:
        return configured
    return fitting[0] if fitting else PlacementStrategy.custom


def _pools_of(space: Space, strategy: PlacementStrategy) -> set[frozenset[str]]:
    """Return the roles with devices that share each pool of a strategy."""
    placement = replace(space.config.placement, strategy=strategy)
    pools = (
        frozenset(role for group in pool.groups if group.together for role in group.roles)
        for pool in pool_requests(space.config.with_sections(placement=placement))
    )
    return {pool for pool in pools if pool}


def _is_configured(space: Space, partition: Partition) -> bool:
    placement = space.config.placement
    if placement.strategy is PlacementStrategy.custom:
        pools: dict[str, set[str]] = {}
        for unit in (*space.units, ROLLOUT):
            pools.setdefault(placement.roles.get(unit, unit), set()).add(unit)
        return set(map(frozenset, partition)) == set(map(frozenset, pools.values()))
    return _strategy(space, partition) is placement.strategy


def skeleton(space: Space, partition: Partition) -> PlacementPlan:
    """Return a placement with the pools of a partition that have one device each.

    What is in memory in each phase depends only on which roles share devices, so it decides it for all sizes.
    """
    roles = {unit: [role.name for role in roles] for unit, roles in units_of(space.config).items()}
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
