"""Finds the fastest placements and layouts of a run: branch and bound over placements, layouts and engines.

The layouts of each unit are computed once per number of devices, from fast to slow. A branch ends when its
lower bound exceeds the best complete steps, which are planned and checked as `megarl check` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.config.validate import PPO_RULES, read_architectures, validate
from megarl.machine.errors import ConfigError
from megarl.placement.memory import budget_problems, plan_memory
from megarl.placement.plan import plan_placement
from megarl.search.bounds import GENERATION, StepSchedule
from megarl.search.choices import device_bytes, with_choice
from megarl.search.costs import StepCosts, StepTime
from megarl.search.engines import EngineShape, engines_of, with_engines
from megarl.search.layouts import layouts
from megarl.search.placements import (
    Partition,
    Pool,
    device_splits,
    partitions,
    placement_of,
    refuse_unpinned_pools,
)
from megarl.search.pool_memory import MemoryShare, PoolMemory, peak_of_pool
from megarl.search.rejections import Reason, Rejections
from megarl.search.solution import Found, Solution
from megarl.search.space import ROLLOUT, Space, Unit, free_keys, roles_of
from megarl.search.variants import LEVEL as VARIANTS
from megarl.search.variants import Variant, VariantTable

LEVEL = "configurations"
# The most configurations with the same pools that are planned. More of them differ by less than the bounds.
_MOST_PLANNED = 400


def search(space: Space, costs: StepCosts, num_results: int = 1) -> Found:
    """Return the fastest configurations of a space.

    Raises:
        ConfigError: No configuration is valid, or a fixed value is not.
    """
    branches = _Search(space, costs, num_results)
    refuse_unpinned_pools(space)
    _refuse_fixed_values(space)
    for max_staleness in _stalenesses(space):
        branches.explore(max_staleness)
    branches.finish()
    if not branches.solutions:
        raise ConfigError("tune", [_nothing_fits(space, branches.rejections)])
    return Found(tuple(branches.solutions), branches.rejections)


def _refuse_fixed_values(space: Space) -> None:
    """Raise ConfigError for violations that nothing in the space can change."""
    free = [key for key in free_keys(space.config) if not space.is_pinned(key)]
    problems = [
        str(violation)
        for violation in validate(space.config)
        if not any(f"{key}.".startswith(f"{mine}.") for key in free for mine in violation.keys)
    ]
    if problems:
        raise ConfigError("tune", problems)


def _stalenesses(space: Space) -> Sequence[int]:
    if space.is_pinned("rollout.max_staleness"):
        return (space.config.rollout.max_staleness,)
    return range(space.max_staleness + 1)


def _nothing_fits(space: Space, rejections: Rejections) -> str:
    most: dict[str, tuple[int, str]] = {}
    for (level, reason), count in rejections.rejected.items():
        if reason not in (Reason.slower, Reason.dominated):
            example = rejections.example(level, reason)
            most[f"{level}: {reason.value}"] = (count, example)
    reasons = "; ".join(
        f"{count:,} {name}{f' (such as: {example})' if example else ''}"
        for name, (count, example) in sorted(most.items(), key=lambda each: -each[1][0])
    )
    pinned = f", pinned keys: {', '.join(sorted(space.pinned))}" if space.pinned else ""
    return (
        f"no configuration on {space.num_devices} devices is valid{pinned}. Rejected: {reasons or 'nothing'}"
        f"; use more devices, or pin fewer keys"
    )


def configured_step(space: Space, costs: StepCosts) -> StepTime | None:
    """Return the predicted step of a run as its file has it, None if that is not valid on these devices."""
    config = space.config
    architectures, _ = read_architectures(config)
    if validate(config):
        return None
    try:
        plan = plan_placement(config)
    except ConfigError:
        return None
    if budget_problems(config, plan_memory(config, plan, architectures)):
        return None
    return costs.predict_step(config, plan, architectures)


class _Split(NamedTuple):
    """A division of the devices into the pools of a partition, with a rough bound of its time."""

    partition: Partition
    pools: tuple[Pool, ...]
    bound_s: float


class _Search:
    """The state of a search."""

    def __init__(self, space: Space, costs: StepCosts, num_results: int) -> None:
        self.space = space
        self._costs = costs
        self._num_results = num_results
        self._architectures, unreadable = read_architectures(space.config)
        if unreadable:
            raise ConfigError("tune", [str(each) for each in unreadable])
        self.rejections = Rejections()
        self.solutions: list[Solution] = []
        self._tables: dict[tuple[str, int, int], VariantTable] = {}
        self._engines: dict[tuple[tuple[int, ...], int], list[EngineShape]] = {}
        self._fastest: dict[tuple[str, int], float] = {}  # seconds by unit and number of devices

    @property
    def bound_s(self) -> float:
        """The time that another result must beat."""
        return self.solutions[-1].seconds if len(self.solutions) >= self._num_results else float("inf")

    @property
    def bound_of_phases_s(self) -> float:
        """The time that the phases of another result must beat."""
        return self.bound_s - self._costs.overhead_s(self.space.config)

    def explore(self, max_staleness: int) -> None:
        """Search all placements with a `rollout.max_staleness`."""
        splits = [
            _Split(partition, pools, self._split_bound(pools, max_staleness))
            for partition in partitions(self.space, max_staleness)
            for pools in device_splits(self.space, partition)
        ]
        memories: dict[Partition, PoolMemory] = {}
        # Fast splits first, so that slow ones are cut.
        for split in sorted(splits, key=lambda each: each.bound_s):
            self.rejections.consider("placements")
            if self._split_bound(split.pools, max_staleness) >= self.bound_of_phases_s:
                self.rejections.reject("placements", Reason.slower)
                continue
            if (problem := self._placement_problem(split.pools, max_staleness)) is not None:
                self.rejections.reject("placements", Reason.rules, problem)
                continue
            try:
                if split.partition not in memories:
                    memories[split.partition] = PoolMemory(self.space, split.partition, self._architectures)
            except ConfigError as error:
                self.rejections.reject("placements", Reason.rules, "; ".join(error.problems))
                continue
            _Branch(self, split.pools, memories[split.partition], max_staleness).explore()

    def _placement_problem(self, pools: Sequence[Pool], max_staleness: int) -> str | None:
        """Return why generation cannot run this far ahead in a placement, None if it can."""
        config = self.space.config
        config = config.with_sections(
            placement=placement_of(self.space, pools),
            rollout=replace(config.rollout, max_staleness=max_staleness),
        )
        for rule, keys in PPO_RULES.items():
            if "rollout.max_staleness" in keys:
                for violation in rule(config):
                    return str(violation)
        return None

    def _split_bound(self, pools: Sequence[Pool], max_staleness: int) -> float:
        """Return a lower bound of a step before the layouts of the units in these pools are computed."""
        of_pools = max(
            sum(self._least_s(unit, pool) for unit in self.space.units if unit.name in pool.units)
            for pool in pools
        )
        shapes = self.engines(next(pool for pool in pools if ROLLOUT in pool.units), max_staleness)
        generation_s = shapes[0].seconds if shapes else 0.0
        return max(of_pools, generation_s) if max_staleness else of_pools + generation_s

    def _least_s(self, unit: Unit, pool: Pool) -> float:
        """Return a lower bound of a unit's time: on more devices, it is known not to be faster than this."""
        known = [
            seconds
            for (name, num_devices), seconds in self._fastest.items()
            if name == unit.name and num_devices >= pool.num_devices
        ]
        config = self.space.config
        rough = sum(
            self._costs.least_role_s(config, role, self._architectures[role.name], pool.num_devices)
            for role in roles_of(config, unit)
        )
        return max(rough, *known, 0.0)

    def table(self, unit: Unit, pool: Pool) -> VariantTable:
        """Return the variants of a unit over the devices of a pool."""
        key = (unit.name, pool.num_devices, pool.granule)
        if key not in self._tables:
            roles = roles_of(self.space.config, unit)
            found = layouts(
                self.space, roles, self._architectures, pool.num_devices, pool.granule, self.rejections
            )
            table = VariantTable(self.space, unit, self._architectures, found, self._costs, self.rejections)
            self._tables[key] = table
            if (fastest := next(iter(table), None)) is not None:
                self._fastest[unit.name, pool.num_devices] = fastest.seconds
        return self._tables[key]

    def engines(self, pool: Pool, max_staleness: int) -> list[EngineShape]:
        """Return the shapes of the engines in a pool."""
        key = (tuple(count for count in pool.on_nodes if count), max_staleness)
        if key not in self._engines:
            policy = self._architectures["actor"]
            self._engines[key] = engines_of(
                self.space, policy, pool, max_staleness, self._costs, self.rejections
            )
        return self._engines[key]

    def finish(self) -> None:
        """Count the variants that were never needed, because faster ones decided."""
        for table in self._tables.values():
            self.rejections.reject(VARIANTS, Reason.slower, count=table.num_waiting)

    def complete(
        self, pools: tuple[Pool, ...], variants: Mapping[str, Variant], engines: EngineShape
    ) -> None:
        """Plan, check and predict a configuration, and keep it if it is among the best."""
        config = self.space.config.with_sections(placement=placement_of(self.space, pools))
        for unit in self.space.units:
            config = with_choice(config, unit, variants[unit.name].choice)
        config = with_engines(config, engines.choice)
        try:
            plan = plan_placement(config)
        except ConfigError as error:
            self.rejections.reject(LEVEL, Reason.node, error.problems[0])
            return

        step = self._costs.predict_step(config, plan, self._architectures)
        if step.seconds >= self.bound_s:
            self.rejections.reject(LEVEL, Reason.slower)
            return
        for violation in validate(config):
            self.rejections.reject(LEVEL, Reason.rules, str(violation))
            return
        memory = plan_memory(config, plan, self._architectures)
        for problem in budget_problems(config, memory):
            self.rejections.reject(LEVEL, Reason.memory, problem)
            return

        choices = {name: variant.choice for name, variant in variants.items()}
        self._keep(
            Solution(
                config=config,
                plan=plan,
                memory=memory,
                step=step,
                pools=pools,
                choices=choices,
                engines=engines.choice,
            )
        )

    def _keep(self, new: Solution) -> None:
        """Insert a solution. Of each kind only the fastest one is kept."""
        same = next((each for each in self.solutions if each.kind == new.kind), None)
        if same is not None and same.seconds <= new.seconds:
            return
        others = [each for each in self.solutions if each is not same]
        self.solutions = sorted([*others, new], key=lambda each: each.seconds)[: self._num_results]


class _Branch:
    """The configurations with the same pools.

    Args:
        parent: The search.
        pools: The pools.
        memory: The memory of their units.
        max_staleness: The steps by which generation runs ahead.
    """

    def __init__(
        self, parent: _Search, pools: tuple[Pool, ...], memory: PoolMemory, max_staleness: int
    ) -> None:
        self._parent = parent
        self._pools = pools
        self._memory = memory
        self._schedule = StepSchedule(memory.plan, generates_ahead=max_staleness > 0)
        self._max_staleness = max_staleness
        self._limit = device_bytes(parent.space)
        self._shares: dict[tuple[str, int], MemoryShare] = {}
        self._tables: list[tuple[Unit, int]] = []
        self._variants: list[VariantTable] = []
        self._engines: list[EngineShape] = []
        self._fastest: list[float] = []
        self._num_planned = 0

    def explore(self) -> None:
        """Search the branch, or reject its pools if a unit or the engines do not fit in theirs."""
        parent = self._parent
        self._tables = [(unit, self._pool_of(unit.name)) for unit in parent.space.units]
        self._variants = [parent.table(unit, self._pools[pool]) for unit, pool in self._tables]
        self._engines = parent.engines(self._pools[self._pool_of(ROLLOUT)], self._max_staleness)
        fastest = [next(iter(table), None) for table in self._variants]
        if None in fastest or not self._engines:
            name = ROLLOUT if None not in fastest else self._tables[fastest.index(None)][0].name
            devices = self._pools[self._pool_of(name)].num_devices
            parent.rejections.reject("placements", Reason.memory, f"{name} does not fit on {devices} devices")
            return

        of_pools = [0.0] * len(self._pools)
        for (_, pool), variant in zip(self._tables, fastest, strict=True):
            of_pools[pool] += variant.seconds if variant else 0.0
        self._fastest = [variant.seconds for variant in fastest if variant]
        self._choose({}, of_pools, [[] for _ in self._pools])

    def _pool_of(self, unit: str) -> int:
        return next(number for number, pool in enumerate(self._pools) if unit in pool.units)

    def _choose(
        self, chosen: dict[str, Variant], of_pools: Sequence[float], shares: Sequence[Sequence[MemoryShare]]
    ) -> None:
        """Choose a variant of the next unit.

        Args:
            chosen: The variants of the units before it.
            of_pools: The sum of the models' times in each pool: of the chosen variants, and otherwise of the
                fastest ones.
            shares: The memory of the chosen variants in each pool.
        """
        index = len(chosen)
        if index == len(self._tables):
            self._choose_engines(chosen, of_pools, shares)
            return

        parent = self._parent
        unit, pool = self._tables[index]
        for variant in self._variants[index]:
            slower = variant.seconds - self._fastest[index]
            sums = [each + slower * (number == pool) for number, each in enumerate(of_pools)]
            # Variants are sorted, so the following ones are slower too.
            if (
                self._num_planned >= _MOST_PLANNED
                or self._schedule.least(sums, self._engines[0].seconds) >= parent.bound_of_phases_s
            ):
                return
            share = self._share(unit, variant)
            of_pool = [*shares[pool], share]
            if peak_of_pool(of_pool) > self._limit:
                parent.rejections.consider(LEVEL)
                parent.rejections.reject(LEVEL, Reason.memory, f"{unit.name} in a pool with others")
                continue
            inside = [of_pool if number == pool else each for number, each in enumerate(shares)]
            self._choose({**chosen, unit.name: variant}, sums, inside)

    def _share(self, unit: Unit, variant: Variant) -> MemoryShare:
        key = (unit.name, id(variant))
        if key not in self._shares:
            self._shares[key] = self._memory.of_models(variant.memory, variant.per_stage)
        return self._shares[key]

    def _choose_engines(
        self, chosen: dict[str, Variant], of_pools: Sequence[float], shares: Sequence[Sequence[MemoryShare]]
    ) -> None:
        parent = self._parent
        times = {name: seconds for each in chosen.values() for name, seconds in each.phases.items()}
        pool = self._pool_of(ROLLOUT)

        for engines in self._engines:
            if (
                self._num_planned >= _MOST_PLANNED
                or self._schedule.least(of_pools, engines.seconds) >= parent.bound_of_phases_s
            ):
                return
            parent.rejections.consider(LEVEL)
            if self._schedule.seconds({**times, GENERATION: engines.seconds}) >= parent.bound_of_phases_s:
                parent.rejections.reject(LEVEL, Reason.slower)
                continue
            share = self._memory.of_engines(engines.usage, engines.choice.num_devices)
            if peak_of_pool([*shares[pool], share]) > self._limit:
                parent.rejections.reject(LEVEL, Reason.memory, "the engines in a pool with others")
                continue
            self._num_planned += 1
            parent.complete(self._pools, chosen, engines)
