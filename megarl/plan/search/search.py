"""Finds the fastest placements and layouts of a run: branch and bound over placements, layouts and engines.

The layouts of each unit are computed once per number of devices, from fast to slow. A branch ends when its
lower bound exceeds the best complete steps, which are planned and checked as `megarl check` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from megarl.config.validate import RULES, Needs, checks_of, read_architectures, validate
from megarl.machine.errors import ConfigError, counted
from megarl.plan.placement.activations import RoleMemory
from megarl.plan.placement.memory import PlacedMemory, budget_problems, plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.search.solution import Solution
from megarl.plan.search.space import (
    ROLLOUT,
    Partition,
    Pool,
    Reason,
    Rejections,
    Space,
    device_splits,
    partitions,
    placement_of,
    refusals,
    skeleton,
)
from megarl.plan.search.tables import EngineShape, Tables
from megarl.plan.search.variants import Variant
from megarl.plan.step_time.step import GENERATION, PredictedCosts, PredictedStep, StepSchedule


def search(space: Space, costs: PredictedCosts, num_results: int = 1) -> tuple[list[Solution], Rejections]:
    """Return the fastest configurations of a space, each of another kind, from fast to slow.

    Also returns what was considered, and why the rest was left out.

    Raises:
        ConfigError: No configuration is valid, or a fixed value is not.
    """
    architectures, unreadable = read_architectures(space.config)
    if problems := list(map(str, unreadable)) or refusals(space):
        raise ConfigError("tune", problems)

    tables = Tables(space, architectures, costs)
    best = BestSolutions(tables, num_results)
    stalenesses: Sequence[int] = range(space.max_staleness + 1)
    if space.is_pinned("rollout.max_staleness"):
        stalenesses = (space.config.rollout.max_staleness,)
    for max_staleness in stalenesses:
        _explore(tables, best, max_staleness)

    tables.finish()
    if not best.solutions:
        raise ConfigError("tune", [_nothing_fits(space, tables.rejections)])
    return list(best.solutions), tables.rejections


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
        f"no configuration on {counted(space.num_devices, 'device')} is valid{pinned}. Rejected: "
        f"{reasons or 'nothing'}; use more devices, or pin fewer keys"
    )


def configured_step(space: Space, costs: PredictedCosts) -> PredictedStep:
    """Return the predicted step of a run as its file has it.

    Raises:
        ConfigError: The run is not valid on these devices.
    """
    config = space.config
    architectures, _ = read_architectures(config)
    if problems := validate(config):
        raise ConfigError("tune", list(map(str, problems)))
    plan = plan_placement(config)
    if over := budget_problems(config, plan_memory(config, plan, architectures)):
        raise ConfigError("tune", over)
    return costs.predict_step(config, plan, architectures)


def _explore(tables: Tables, best: BestSolutions, max_staleness: int) -> None:
    """Search all placements with a `rollout.max_staleness`."""
    space = tables.space
    rejections = tables.rejections
    splits = [
        (tables.least_s(pools, max_staleness), pools)
        for partition in partitions(space, max_staleness)
        for pools in device_splits(space, partition)
    ]
    memories: dict[Partition, PlacedMemory] = {}

    # Fast splits first, so that slow ones are cut.
    for _, pools in sorted(splits, key=itemgetter(0)):
        rejections.consider("placements")
        if tables.least_s(pools, max_staleness) >= best.bound_of_phases_s:
            rejections.reject("placements", Reason.slower)
            continue
        if (problem := _placement_problem(space, pools, max_staleness)) is not None:
            rejections.reject("placements", Reason.rules, problem)
            continue
        partition = tuple(pool.units for pool in pools)
        try:
            if partition not in memories:
                memories[partition] = PlacedMemory(
                    space.config, skeleton(space, partition), tables.architectures
                )
        except ConfigError as error:
            rejections.reject("placements", Reason.rules, "; ".join(error.problems))
            continue

        Branch(tables, best, pools, memories[partition], max_staleness).explore()


def _placement_problem(space: Space, pools: Sequence[Pool], max_staleness: int) -> str | None:
    """Return why generation cannot run this far ahead in a placement, None if it can."""
    config = space.config.with_sections(
        placement=placement_of(space, pools),
        rollout=replace(space.config.rollout, max_staleness=max_staleness),
    )
    checks = (
        check for check in checks_of(RULES, Needs.run, config) if "rollout.max_staleness" in check.numbers
    )
    return next((str(found) for check in checks for found in check.run(config)), None)


class ClusterResult(NamedTuple):
    """The fastest configuration of a cluster for one `rollout.max_staleness`.

    Attributes:
        solution: The configuration, None if none is valid.
        problem: Why none is valid; empty otherwise.
    """

    num_devices: int
    max_staleness: int
    solution: Solution | None
    problem: str = ""


def search_clusters(spaces: Sequence[Space], costs: PredictedCosts) -> Iterator[ClusterResult]:
    """Yield the best configuration of each space for each `max_staleness` up to its limit."""
    for space in spaces:
        for max_staleness in range(space.max_staleness + 1):
            rollout = replace(space.config.rollout, max_staleness=max_staleness)
            pinned = replace(
                space,
                config=space.config.with_sections(rollout=rollout),
                pinned=space.pinned | {"rollout.max_staleness"},
            )
            try:
                solution, problem = search(pinned, costs)[0][0], ""
            except ConfigError as error:
                solution, problem = None, "; ".join(error.problems)
            yield ClusterResult(space.num_devices, max_staleness, solution, problem)


# The most configurations with the same pools that are planned. More of them differ by less than the bounds.
_MOST_PLANNED = 400
LEVEL = "configurations"

# The bytes of a unit on the devices of its pool, by pipeline stage and phase, and the number of devices of a
# stage. Stages follow each other from the pool's first device.
MemoryShare = tuple[tuple[tuple[int, ...], ...], int]


class BestSolutions:
    """The fastest configurations so far.

    Args:
        tables: The search's costs, and where it is counted what was left out.
        num_results: The number of configurations to keep.
    """

    def __init__(self, tables: Tables, num_results: int) -> None:
        self.solutions: list[Solution] = []
        self._tables = tables
        self._num_results = num_results

    @property
    def bound_s(self) -> float:
        """The time that another result must beat."""
        return self.solutions[-1].seconds if len(self.solutions) >= self._num_results else float("inf")

    @property
    def bound_of_phases_s(self) -> float:
        """The time that the phases of another result must beat."""
        return self.bound_s - self._tables.costs.overhead_s(self._tables.space.config)

    def complete(
        self, pools: tuple[Pool, ...], variants: Mapping[str, Variant], engines: EngineShape
    ) -> None:
        """Plan, check and predict a configuration, and keep it if it is among the best."""
        space = self._tables.space
        architectures = self._tables.architectures
        reject = partial(self._tables.rejections.reject, LEVEL)
        sections: dict[str, Any] = {"placement": placement_of(space, pools), "rollout": engines.rollout}
        for variant in variants.values():
            sections |= variant.sections
        config = space.config.with_sections(**sections)

        try:
            plan = plan_placement(config)
        except ConfigError as error:
            reject(Reason.node, error.problems[0])
            return

        step = self._tables.costs.predict_step(config, plan, architectures)
        if step.seconds >= self.bound_s:
            reject(Reason.slower)
            return

        # One violation is enough, so the others are not looked for.
        for violation in validate(config):
            reject(Reason.rules, str(violation))
            return

        memory = plan_memory(config, plan, architectures)
        for problem in budget_problems(config, memory):
            reject(Reason.memory, problem)
            return

        self._keep(Solution(config=config, plan=plan, memory=memory, step=step, pools=pools))

    def _keep(self, new: Solution) -> None:
        """Insert a solution. Of each kind only the fastest one is kept."""
        same = next((each for each in self.solutions if each.kind == new.kind), None)
        if same is not None and same.seconds <= new.seconds:
            return
        others = [each for each in self.solutions if each is not same]
        self.solutions = sorted([*others, new], key=lambda each: each.seconds)[: self._num_results]


class Branch:
    """The configurations with the same pools.

    Args:
        tables: The variants and engines to choose from.
        best: Where complete configurations are kept.
        placed: The memory in placements with these pools.
        max_staleness: The steps by which generation runs ahead.
    """

    def __init__(
        self,
        tables: Tables,
        best: BestSolutions,
        pools: tuple[Pool, ...],
        placed: PlacedMemory,
        max_staleness: int,
    ) -> None:
        self._best = best
        self._rejections = tables.rejections
        self._pools = pools
        self._placed = placed

        self._schedule = StepSchedule(placed.plan, generates_ahead=max_staleness > 0)
        self._max_staleness = max_staleness
        self._limit = tables.space.device_bytes

        self._shares: dict[tuple[str, int], MemoryShare] = {}
        self._units = [(unit, self._pool_of(unit)) for unit in tables.space.units]
        self._variants = [tables.variants(unit, pools[pool]) for unit, pool in self._units]
        self._engines = tables.engines(pools[self._pool_of(ROLLOUT)], max_staleness)
        self._fastest: list[float] = []
        self._num_planned = 0

    def explore(self) -> None:
        """Search the branch, or reject its pools if a unit or the engines do not fit in theirs."""
        fastest = [next(iter(table), None) for table in self._variants]
        if None in fastest or not self._engines:
            name = ROLLOUT if None not in fastest else self._units[fastest.index(None)][0]
            devices = self._pools[self._pool_of(name)].num_devices
            self._rejections.reject(
                "placements", Reason.memory, f"{name} does not fit on {counted(devices, 'device')}"
            )
            return

        # With the fastest variant of each unit, the sums are lower bounds.
        of_pools = [0.0] * len(self._pools)
        for (_, pool), variant in zip(self._units, fastest, strict=True):
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
        if index == len(self._units):
            self._choose_engines(chosen, of_pools, shares)
            return

        unit, pool = self._units[index]
        for variant in self._variants[index]:
            slower = variant.seconds - self._fastest[index]
            sums = [each + slower * (number == pool) for number, each in enumerate(of_pools)]
            # Variants are sorted, so the following ones are slower too.
            if (
                self._num_planned >= _MOST_PLANNED
                or self._least_s(sums, self._engines[0].seconds) >= self._best.bound_of_phases_s
            ):
                return
            of_pool = [*shares[pool], self._share(unit, variant)]
            if peak_of_pool(of_pool) > self._limit:
                self._rejections.consider(LEVEL)
                self._rejections.reject(LEVEL, Reason.memory, f"{unit} in a pool with others")
                continue
            inside = [of_pool if number == pool else each for number, each in enumerate(shares)]
            self._choose({**chosen, unit: variant}, sums, inside)

    def _least_s(self, of_pools: Sequence[float], generation_s: float) -> float:
        """Return a lower bound from the sum of the models' times in each pool.

        Everything follows generation, unless generation runs ahead.
        """
        longest = max(of_pools, default=0.0)
        return max(longest, generation_s) if self._max_staleness else longest + generation_s

    def _share(self, unit: str, variant: Variant) -> MemoryShare:
        key = (unit, id(variant))
        if key not in self._shares:
            self._shares[key] = share_of_models(self._placed, variant.memory, variant.parallel.stage_size)
        return self._shares[key]

    def _choose_engines(
        self, chosen: dict[str, Variant], of_pools: Sequence[float], shares: Sequence[Sequence[MemoryShare]]
    ) -> None:
        times = {name: seconds for each in chosen.values() for name, seconds in each.phases.items()}
        pool = self._pool_of(ROLLOUT)

        for engines in self._engines:
            # The engines are in the order of their time, so the others are no faster.
            if (
                self._num_planned >= _MOST_PLANNED
                or self._least_s(of_pools, engines.seconds) >= self._best.bound_of_phases_s
            ):
                return
            self._rejections.consider(LEVEL)
            if self._schedule.seconds({**times, GENERATION: engines.seconds}) >= self._best.bound_of_phases_s:
                self._rejections.reject(LEVEL, Reason.slower)
                continue

            if peak_of_pool([*shares[pool], share_of_engines(self._placed, engines)]) > self._limit:
                self._rejections.reject(LEVEL, Reason.memory, "the engines in a pool with others")
                continue
            self._num_planned += 1
            self._best.complete(self._pools, chosen, engines)


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


def share_of_engines(placed: PlacedMemory, engines: EngineShape) -> MemoryShare:
    """Return the bytes of the engines, which have the first devices of their pool."""
    num_devices = engines.rollout.num_replicas * engines.rollout.tensor_parallel_size
    return (tuple(placed.of_engine(engines.usage, phase).total for phase in placed.phases),), num_devices


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
