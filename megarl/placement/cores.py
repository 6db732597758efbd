"""Who shares a node's cores when nothing but CPUs computes: of each phase, the processes that may be at work
with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megarl.placement.dataflow import overlaps, phases_of
from megarl.placement.placement_plan import PlacementPlan

# role -> the worker's method -> processes of a node. A method that is not here takes the threads that there
# are.
AtWork = Mapping[str, Mapping[str, int]]
NOBODY: AtWork = MappingProxyType({})
_WAITS = "reward"  # its process waits for others, which are of the user's code


def at_work(plan: PlacementPlan) -> AtWork:
    """A phase alone has all cores for its processes; side by side they share. It follows from the plan, never
    from load."""
    # Phases that may run side by side, looked up from either of the two.
    beside: dict[str, set[str]] = {}
    for one, other in overlaps(plan):
        beside.setdefault(one, set()).add(other)
        beside.setdefault(other, set()).add(one)

    computing = {
        phase.name: (phase.calls, phase.roles)
        for phase in phases_of(plan.roles)
        if phase.calls and _WAITS not in phase.roles
    }
    table: dict[str, dict[str, int]] = {}

    for name, (calls, own) in computing.items():
        # Plan for the worst case: everything that may overlap with this phase runs at once.
        at_a_time = {name, *beside.get(name, ())} & computing.keys()
        number = _on_fullest_node(plan, {role for each in at_a_time for role in computing[each][1]})
        for role in own:
            table.setdefault(role, {}).update(dict.fromkeys(calls, number))

    return table


def _on_fullest_node(plan: PlacementPlan, roles: set[str]) -> int:
    nodes = [process.node for process in plan.processes if roles.intersection(process.roles)]
    return max(map(nodes.count, nodes))
