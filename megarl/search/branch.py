"""The configurations of one placement: a variant of each unit, and a shape of the engines.

Lower bounds of a step's time, from the times of its phases, leave out placements that cannot be better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.machine.wording import counted
from megarl.placement.dataflow import Phase, phases_of, waits_for
from megarl.placement.placement_plan import PlacementPlan
from megarl.search.best import LEVEL, BestSolutions
from megarl.search.choices import device_bytes
from megarl.search.engines import EngineShape
from megarl.search.placements import Pool
from megarl.search.pool_memory import MemoryShare, PoolMemory, peak_of_pool
from megarl.search.rejections import Reason, Rejections
from megarl.search.space import ROLLOUT, Space, Unit
from megarl.search.tables import Tables
from megarl.search.variants import Variant, VariantTable

# The most configurations with the same pools that are planned. More of them differ by less than the bounds.
_MOST_PLANNED = 400

GENERATION = "gen"


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
        memory: PoolMemory,
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
        self._limit = device_bytes(space)

        self._shares: dict[tuple[str, int], MemoryShare] = {}
        self._units: list[tuple[Unit, int]] = []
        self._variants: list[VariantTable] = []
        self._engines: list[EngineShape] = []
        self._fastest: list[float] = []
        self._num_planned = 0

    def explore(self) -> None:
        """Search the branch, or reject its pools if a unit or the engines do not fit in theirs."""
        self._units = [(unit, self._pool_of(unit.name)) for unit in self._space.units]
        self._variants = [self._tables.variants(unit, self._pools[pool]) for unit, pool in self._units]
        self._engines = self._tables.engines(self._pools[self._pool_of(ROLLOUT)], self._max_staleness)
        fastest = [next(iter(table), None) for table in self._variants]
        if None in fastest or not self._engines:
            name = ROLLOUT if None not in fastest else self._units[fastest.index(None)][0].name
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
                or self._schedule.least(sums, self._engines[0].seconds) >= self._best.bound_of_phases_s
            ):
                return
            share = self._share(unit, variant)
            of_pool = [*shares[pool], share]
            if peak_of_pool(of_pool) > self._limit:
                self._rejections.consider(LEVEL)
                self._rejections.reject(LEVEL, Reason.memory, f"{unit.name} in a pool with others")
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
        times = {name: seconds for each in chosen.values() for name, seconds in each.phases.items()}
        pool = self._pool_of(ROLLOUT)

        for engines in self._engines:
            # The engines are in the order of their time, so the others are no faster.
            if (
                self._num_planned >= _MOST_PLANNED
                or self._schedule.least(of_pools, engines.seconds) >= self._best.bound_of_phases_s
            ):
                return
            self._rejections.consider(LEVEL)
            if self._schedule.seconds({**times, GENERATION: engines.seconds}) >= self._best.bound_of_phases_s:
                self._rejections.reject(LEVEL, Reason.slower)
                continue

            share = self._memory.of_engines(engines.usage, engines.choice.num_devices)
            if peak_of_pool([*shares[pool], share]) > self._limit:
                self._rejections.reject(LEVEL, Reason.memory, "the engines in a pool with others")
                continue
            self._num_planned += 1
            self._best.complete(self._pools, chosen, engines)


class StepSchedule:
    """The order of a step's phases in a placement.

    A phase begins when those that it depends on have ended, and when its devices are free.

    Args:
        plan: A placement with these pools, of any size.
        generates_ahead: Whether generation overlaps with the rest of a step.
    """

    def __init__(self, plan: PlacementPlan, *, generates_ahead: bool) -> None:
        step = phases_of(plan.roles)
        self._waits = waits_for(step)
        self._pools = {phase.name: _pools(plan, phase) for phase in step}
        self._step: Sequence[Phase] = step
        self._generates_ahead = generates_ahead

    def seconds(self, times: Mapping[str, float]) -> float:
        """Return the time of a step. Phases without a time take none.

        Args:
            times: The seconds of each phase.
        """
        ends: dict[str, float] = {}
        free: dict[str, float] = {}
        for phase in self._step:
            if self._generates_ahead and phase.name == GENERATION:
                # The engines generate for a later step, at the same time as all other phases.
                ends[phase.name] = 0.0
                continue
            waited = [ends[name] for name in self._waits[phase.name]]
            pools = self._pools[phase.name]
            begin = max((*waited, *(free.get(pool, 0.0) for pool in pools)), default=0.0)
            ends[phase.name] = begin + times.get(phase.name, 0.0)
            free.update(dict.fromkeys(pools, ends[phase.name]))

        ahead = times.get(GENERATION, 0.0) if self._generates_ahead else 0.0
        return max(ahead, *ends.values())

    def least(self, of_pools: Sequence[float], generation_s: float) -> float:
        """Return a lower bound from the sum of the models' times in each pool.

        Everything follows generation, unless generation runs ahead.
        """
        longest = max(of_pools, default=0.0)
        return max(longest, generation_s) if self._generates_ahead else longest + generation_s


def _pools(plan: PlacementPlan, phase: Phase) -> tuple[str, ...]:
    groups = [plan.group_of(role) for role in phase.roles]
    return tuple(dict.fromkeys(group.pool for group in groups if group.uses_devices))
