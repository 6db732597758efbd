"""The configurations of one placement: a variant of each unit, and a shape of the engines.

Lower bounds of a step's time, from the times of its phases, leave out placements that cannot be better.
The best configurations are planned and checked as `megarl check` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.validate import validate
from megarl.machine.errors import ConfigError
from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.plan.placement.activations import RoleMemory
from megarl.plan.placement.memory import PlacedMemory, budget_problems, plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.search.engines import EngineShape
from megarl.plan.search.placements import Pool, placement_of
from megarl.plan.search.predicted_costs import PredictedCosts
from megarl.plan.search.solution import Solution
from megarl.plan.search.space import ROLLOUT, Reason, Rejections, Space
from megarl.plan.search.tables import Tables
from megarl.plan.search.variants import Variant, VariantTable
from megarl.plan.step_time.step import GENERATION, StepSchedule

# The most configurations with the same pools that are planned. More of them differ by less than the bounds.
_MOST_PLANNED = 400
LEVEL = "configurations"

# The bytes of a unit on the devices of its pool, by pipeline stage and phase, and the number of devices of a
# stage. Stages follow each other from the pool's first device.
MemoryShare = tuple[tuple[tuple[int, ...], ...], int]


class BestSolutions:
    """The fastest configurations so far.

    Args:
        rejections: Where it is counted what was left out.
        num_results: The number of configurations to keep.
    """

    def __init__(
        self,
        space: Space,
        architectures: Mapping[str, Architecture],
        costs: PredictedCosts,
        rejections: Rejections,
        num_results: int,
    ) -> None:
        self.solutions: list[Solution] = []
        self._space = space
        self._architectures = architectures
        self._costs = costs
        self._rejections = rejections
        self._num_results = num_results

    @property
    def bound_s(self) -> float:
        """The time that another result must beat."""
        return self.solutions[-1].seconds if len(self.solutions) >= self._num_results else float("inf")

    @property
    def bound_of_phases_s(self) -> float:
        """The time that the phases of another result must beat."""
        return self.bound_s - self._costs.overhead_s(self._space.config)

    def complete(
        self, pools: tuple[Pool, ...], variants: Mapping[str, Variant], engines: EngineShape
    ) -> None:
        """Plan, check and predict a configuration, and keep it if it is among the best."""
        sections: dict[str, Any] = {"placement": placement_of(self._space, pools), "rollout": engines.rollout}
        for variant in variants.values():
            sections |= variant.sections
        config = self._space.config.with_sections(**sections)

        try:
            plan = plan_placement(config)
        except ConfigError as error:
            self._rejections.reject(LEVEL, Reason.node, error.problems[0])
            return

        step = self._costs.predict_step(config, plan, self._architectures)
        if step.seconds >= self.bound_s:
            self._rejections.reject(LEVEL, Reason.slower)
            return

        # One violation is enough, so the others are not looked for.
        for violation in validate(config):
            self._rejections.reject(LEVEL, Reason.rules, str(violation))
            return

        memory = plan_memory(config, plan, self._architectures)
        for problem in budget_problems(config, memory):
            self._rejections.reject(LEVEL, Reason.memory, problem)
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
        rejections: Where it is counted what was left out.
        memory: The memory of their units.
        max_staleness: The steps by which generation runs ahead.
    """

    def __init__(
        self,
        space: Space,
        tables: Tables,
        best: BestSolutions,
        rejections: Rejections,
        pools: tuple[Pool, ...],
        memory: PlacedMemory,
        max_staleness: int,
    ) -> None:
        self._space = space
        self._tables = tables
        self._best = best
        self._rejections = rejections
        self._pools = pools
        self._memory = memory

        self._schedule = StepSchedule(memory.plan, generates_ahead=max_staleness > 0)
        self._max_staleness = max_staleness
        self._limit = space.device_bytes

        self._shares: dict[tuple[str, int], MemoryShare] = {}
        self._units: list[tuple[str, int]] = []
        self._variants: list[VariantTable] = []
        self._engines: list[EngineShape] = []
        self._fastest: list[float] = []
        self._num_planned = 0

    def explore(self) -> None:
        """Search the branch, or reject its pools if a unit or the engines do not fit in theirs."""
        self._units = [(unit, self._pool_of(unit)) for unit in self._space.units]
        self._variants = [self._tables.variants(unit, self._pools[pool]) for unit, pool in self._units]
        self._engines = self._tables.engines(self._pools[self._pool_of(ROLLOUT)], self._max_staleness)
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
            share = self._share(unit, variant)
            of_pool = [*shares[pool], share]
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
            self._shares[key] = share_of_models(self._memory, variant.memory, variant.parallel.stage_size)
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

            share = share_of_engines(self._memory, engines)
            if peak_of_pool([*shares[pool], share]) > self._limit:
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
