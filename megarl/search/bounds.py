"""Lower bounds of a step's time, from the times of its phases. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.placement.dataflow import Phase, phases_of, waits_for
from megarl.placement.placement_plan import PlacementPlan

GENERATION = "gen"


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
