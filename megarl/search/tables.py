"""The layouts of each unit and the shapes of engines that a search chooses from, computed when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.models.architecture import Architecture
from megarl.search.costs import StepCosts
from megarl.search.engines import EngineShape, engines_of
from megarl.search.layouts import layouts
from megarl.search.placements import Pool
from megarl.search.rejections import Reason, Rejections
from megarl.search.space import ROLLOUT, Space, Unit, roles_of
from megarl.search.variants import LEVEL, VariantTable


class Tables:
    """The variants of units and the shapes of engines, by the devices of their pool.

    Args:
        rejections: Where it is counted what was left out.
    """

    def __init__(
        self,
        space: Space,
        architectures: Mapping[str, Architecture],
        costs: StepCosts,
        rejections: Rejections,
    ) -> None:
        self._space = space
        self._architectures = architectures
        self._costs = costs
        self._rejections = rejections
        self._variants: dict[tuple[str, int, int], VariantTable] = {}
        self._engines: dict[tuple[tuple[int, ...], int], list[EngineShape]] = {}
        self._fastest: dict[tuple[str, int], float] = {}  # seconds by unit and number of devices

    def variants(self, unit: Unit, pool: Pool) -> VariantTable:
        """Return the variants of a unit over the devices of a pool."""
        key = (unit.name, pool.num_devices, pool.granule)
        if key not in self._variants:
            roles = roles_of(self._space.config, unit)
            found = layouts(
                self._space, roles, self._architectures, pool.num_devices, pool.granule, self._rejections
            )
            table = VariantTable(self._space, unit, self._architectures, found, self._costs, self._rejections)
            self._variants[key] = table
            if (fastest := next(iter(table), None)) is not None:
                self._fastest[unit.name, pool.num_devices] = fastest.seconds
        return self._variants[key]

    def engines(self, pool: Pool, max_staleness: int) -> list[EngineShape]:
        """Return the shapes of the engines in a pool."""
        key = (tuple(count for count in pool.on_nodes if count), max_staleness)
        if key not in self._engines:
            policy = self._architectures["actor"]
            self._engines[key] = engines_of(
                self._space, policy, pool, max_staleness, self._costs, self._rejections
            )
        return self._engines[key]

    def least_s(self, pools: Sequence[Pool], max_staleness: int) -> float:
        """Return a lower bound of a step before the layouts of the units in these pools are computed."""
        of_pools = max(
            sum(self._least_of_unit(unit, pool) for unit in self._space.units if unit.name in pool.units)
            for pool in pools
        )
        shapes = self.engines(next(pool for pool in pools if ROLLOUT in pool.units), max_staleness)
        generation_s = shapes[0].seconds if shapes else 0.0
        # In async rollout, generation and training overlap.
        return max(of_pools, generation_s) if max_staleness else of_pools + generation_s

    def _least_of_unit(self, unit: Unit, pool: Pool) -> float:
        """Return a lower bound of a unit's time: on more devices, it is known not to be faster than this."""
        known = [
            seconds
            for (name, num_devices), seconds in self._fastest.items()
            if name == unit.name and num_devices >= pool.num_devices
        ]
        config = self._space.config
        rough = sum(
            self._costs.least_role_s(config, role, self._architectures[role.name], pool.num_devices)
            for role in roles_of(config, unit)
        )
        return max(rough, *known, 0.0)

    def finish(self) -> None:
        """Count the variants that were never needed, because faster ones decided."""
        for table in self._variants.values():
            self._rejections.reject(LEVEL, Reason.slower, count=table.num_waiting)
