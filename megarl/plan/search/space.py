"""The space of a search: which keys are free, the placements of a run over devices, and what was left out.

Layouts, placement, micro-batches, recomputation and the engines' shape are free. Everything else is fixed,
and so is every key that the user pins. In a placement, units share pools of devices: units are divided into
pools in every way (HybridFlow, Sheng et al. 2024, arXiv 2409.19256, algorithm 1), and the devices into pools
in steps that grow with the cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from enum import Enum
from math import gcd
from typing import NamedTuple

from megarl.config.roles import SOURCE_TEACHER, ModelRole, judge_roles, model_roles
from megarl.config.schema import (
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RolloutEngineKind,
)
from megarl.config.validate import validate
from megarl.machine.errors import ConfigError
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan, ProcessPlan
from megarl.plan.placement.requests import base_roles, pool_requests

ROLLOUT = "rollout"
_SIZES = tuple(entry.name for entry in fields(ParallelConfig))
_TRAINED = ("recompute", "recompute_modules", "recompute_num_layers", "micro_batch.max_tokens")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The space of a search.

    Attributes:
        config: The run, with the fixed values, and the values of pinned keys.
        pinned: The free keys whose values in `config` are kept.
        max_staleness: The highest `rollout.max_staleness` to consider.
    """

    config: PPOConfig
    pinned: frozenset[str] = frozenset()
    num_nodes: int
    devices_per_node: int
    max_staleness: int = 0

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units (`units_of`)."""
        return tuple(units_of(self.config))

    @property
    def device_bytes(self) -> float:
        """The memory budget of a device in bytes."""
        limit_gb = self.config.placement.device_memory_gb
        assert limit_gb is not None, "the search needs a budget"
        return limit_gb * 2**30

    def is_pinned(self, key: str) -> bool:
        return key in self.pinned


def free_keys(config: PPOConfig) -> tuple[str, ...]:
    """Return the keys that a search chooses for a run, unless they are pinned."""
    keys: list[str] = []
    for role in model_roles(config):
        keys += [f"{role.parallel_key}.{name}" for name in _SIZES]
        section = role.parallel_key.removesuffix(".parallel")
        if role.optim is not None:
            keys += [f"{section}.{name}" for name in _TRAINED]
        elif role.name == "reference":
            keys.append(f"{role.micro_batch_key}.max_tokens")

    engine: RolloutEngineKind = config.rollout.engine
    keys += [f"rollout.{name}" for name in ("num_replicas", "tensor_parallel_size", "expert_parallel_size")]
    keys += ["rollout.max_concurrency", "rollout.max_staleness"]
    keys += [engine.needs.memory_key] if engine.needs.memory_key else []
    keys += ["placement.strategy", "placement.roles", "placement.pools"]
    # Roles that share a layout have the same keys.
    return tuple(dict.fromkeys(keys))


def pinned_keys(config: PPOConfig, given: Iterable[str], overridden: Iterable[str]) -> frozenset[str]:
    """Return the free keys that are kept as configured.

    Args:
        given: Keys or sections that must be free keys.
        overridden: Keys of the command line's overrides, some of which may be free keys.

    Raises:
        ConfigError: One of `given` is not a free key or a section with free keys.
    """
    free = free_keys(config)
    problems = []
    pinned: set[str] = set()

    for key in given:
        if not (within := _within(key, free)):
            near = get_close_matches(key, free, 2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"the search chooses {', '.join(free)}"
            problems.append(f"--pin {key}: the search does not choose this key; {hint}")
        pinned.update(within)
    if problems:
        raise ConfigError("--pin", problems)

    for key in overridden:
        pinned.update(_within(key, free))
    return frozenset(pinned)


def _within(key: str, free: Collection[str]) -> list[str]:
    # An override of a single key of a free mapping, such as one pool, pins the mapping.
    return [each for each in free if each == key or each.startswith(f"{key}.") or key.startswith(f"{each}.")]


def units_of(config: PPOConfig) -> dict[str, list[ModelRole]]:
    """Return the roles of each unit with a model, in the order of the role table.

    A unit is a set of roles with one layout, which are placed together: the actor with its reference, or a
    single role. The first role names it.
    """
    units: dict[str, list[ModelRole]] = {}
    for role in model_roles(config):
        units.setdefault(role.parallel_key, []).append(role)
    return {roles[0].name: roles for roles in units.values()}


def refusals(space: Space) -> list[str]:
    """Return what a search does not choose, and violations that nothing in the space can change."""
    config = space.config
    problems = []
    if served := judge_roles(config):
        problems.append(
            f"reward.judges: the search places no judges that the run serves ({', '.join(served)}); start "
            "their servers by hand, and set url and model instead of path"
        )

    teachers = [role.name for role in model_roles(config) if role.name.startswith(SOURCE_TEACHER)]
    if teachers:
        problems.append(
            f"teachers: the search chooses no layouts of teachers of data sources ({', '.join(teachers)}), "
            "which no override can set; tune the run with the largest of them as `teacher`, and give the "
            "others layouts by hand"
        )

    # No override can remove custom pools of a file.
    keys = ("placement.roles", "placement.pools")
    if (config.placement.roles or config.placement.pools) and not all(map(space.is_pinned, keys)):
        problems.append(
            f"{', '.join(keys)}: an override of the file cannot remove its pools; remove both keys from the "
            "file, or keep the placement with --pin placement"
        )

    problems += [
        f"{role.parallel_key}.pipeline_layout: is {role.parallel.pipeline_layout}, but the search chooses "
        "stages with equally many layers; remove it, or predict a step with `megarl check`"
        for role in model_roles(config)
        if role.parallel.pipeline_layout is not None
    ]
    if (stages := config.rollout.pipeline_parallel_size) > 1:
        problems.append(
            f"rollout.pipeline_parallel_size: is {stages}, but the search chooses engines of one stage; use "
            "pipeline_parallel_size=1, or predict a step with `megarl check`"
        )

    free = [key for key in free_keys(config) if not space.is_pinned(key)]
    return problems or [
        str(violation)
        for violation in validate(config)
        if not any(f"{key}.".startswith(f"{mine}.") for key in free for mine in violation.keys)
    ]


class Reason(str, Enum):
    """Why something was left out of a search."""

    divisibility = "divisibility"  # a size of the model does not divide over the ranks
    node = "node boundary"  # a tensor-parallel group does not fit on a node
    rules = "rules"  # another rule of `megarl check`
    memory = "memory"  # a device would exceed its memory
    dominated = "no smaller and no faster"  # than another variant of the same layout
    slower = "slower"  # its lower bound exceeds the best results


class Rejections:
    """Counts what was considered at each level of a search, and why the rest was left out.

    The levels are layouts of a model, their variants, and complete configurations. At each level, the number
    considered is the number kept plus the numbers rejected.

    Attributes:
        considered: The number of things that were considered, by level.
        rejected: The number of rejections, by level and reason.
    """

    def __init__(self) -> None:
        self.considered: Counter[str] = Counter()
        self.rejected: Counter[tuple[str, Reason]] = Counter()
        self._examples: dict[tuple[str, Reason], str] = {}

    def consider(self, level: str, count: int = 1) -> None:
        self.considered[level] += count

    def reject(self, level: str, reason: Reason, example: str = "", count: int = 1) -> None:
        """Count a rejection of something that has been considered. The first example is kept."""
        if count:
            self.rejected[level, reason] += count
            self._examples.setdefault((level, reason), example)

    def kept(self, level: str) -> int:
        """Return how many things of a level were not rejected."""
        return self.considered[level] - sum(
            count for (name, _), count in self.rejected.items() if name == level
        )

    def example(self, level: str, reason: Reason) -> str:
        """Return the first example of a rejection; empty if there is none."""
        return self._examples.get((level, reason), "")


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
