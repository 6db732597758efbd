"""Decide how many processes share a node's cores in each phase of a CPU-only run."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megarl.plan.placement.dataflow import overlaps, phases_of
from megarl.plan.placement.placement_plan import PlacementPlan

# role -> method of the worker -> processes on a node. Other methods use all available threads.
AtWork = Mapping[str, Mapping[str, int]]
NO_LIMITS: AtWork = MappingProxyType({})
_WAITS = "reward"  # its process waits for others, which run the user's code


def at_work(plan: PlacementPlan) -> AtWork:
    """Return how many processes may work at the same time as each method of a worker.

    A phase that runs alone has all cores for its processes; overlapping phases share them. The result follows
    from the plan, never from the load.
    """
    # Phases that may overlap, looked up from either of the two.
    overlapping: dict[str, set[str]] = {}
    for one, other in overlaps(plan):
        overlapping.setdefault(one, set()).add(other)
        overlapping.setdefault(other, set()).add(one)

    computing = {
        phase.name: (phase.calls, phase.roles)
        for phase in phases_of(plan.roles)
        if phase.calls and _WAITS not in phase.roles
    }
    table: dict[str, dict[str, int]] = {}

    for name, (calls, own) in computing.items():
        # Plan for the worst case: everything that may overlap with this phase runs at once.
        at_a_time = {name, *overlapping.get(name, ())} & computing.keys()
        number = _on_fullest_node(plan, {role for each in at_a_time for role in computing[each][1]})
        for role in own:
            table.setdefault(role, {}).update(dict.fromkeys(calls, number))

    return table


def _on_fullest_node(plan: PlacementPlan, roles: set[str]) -> int:
    nodes = [process.node for process in plan.processes if roles.intersection(process.roles)]
    return max(map(nodes.count, nodes))
