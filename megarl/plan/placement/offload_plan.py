"""Plan which state is in memory in each phase if roles share devices, with the fewest moves. Pure.

Steps repeat, so the next use of everything in memory is known. State that a phase does not need is offloaded
at the first phase on its devices after its last use, but only if a phase before its next use cannot run with
it in memory: it would have to be offloaded anyway. So each part is loaded at most once and offloaded at most
once between two uses, and state that is never in the way stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from megarl.plan.placement.dataflow import ENGINE, GRADIENTS, OPTIMIZER, PARAMETERS, Item, Phase, phases_of
from megarl.plan.placement.placement_plan import PlacementPlan

_HEAVY = (GRADIENTS, OPTIMIZER)


def _of_owners(phase: Phase, bases: Mapping[str, str]) -> Phase:
    """Return the phase with what it needs in memory of the roles that own it.

    A model without its adapters has no memory of its own.
    """
    needs = frozenset(item._replace(role=bases.get(item.role, item.role)) for item in phase.needs)
    return phase._replace(needs=needs)


class OffloadPlan:
    """The offload plan of a placement. Parts are named as in dataflow.py."""

    def __init__(self, plan: PlacementPlan) -> None:
        self._plan = plan
        self._phases = {phase.name: _of_owners(phase, dict(plan.bases)) for phase in phases_of(plan.roles)}
        self._sharing = {role: frozenset(plan.on_same_devices(role)) for role in plan.roles}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases in the order of a step."""
        return tuple(self._phases.values())

    def phase(self, name: str) -> Phase:
        return self._phases[name]

    @cached_property
    def offloadable(self) -> frozenset[Item]:
        """The parts that are offloaded at some time. All others are always in memory."""
        items = {item for phase in self._phases.values() for item in phase.needs}
        return frozenset(
            item for item in items if any(self._must_be_out(item, phase) for phase in self._phases.values())
        )

    @property
    def engines_move(self) -> bool:
        return Item("rollout", ENGINE) in self.offloadable

    def offloaded_at_first(self, role: str) -> tuple[str, ...]:
        """Return the parts of a model that are offloaded as soon as it is built."""
        return tuple(
            part for part in (GRADIENTS, OPTIMIZER, PARAMETERS) if Item(role, part) in self.offloadable
        )

    def leaving(self, name: str) -> frozenset[Item]:
        """Return the parts that are offloaded, if they are in memory, when the phase begins."""
        phase = self._phases[name]
        near = {role for own in phase.roles for role in (own, *self._sharing[own])}
        return frozenset(
            item
            for item in self.offloadable - phase.needs
            if item.role in near
            and any(self._must_be_out(item, later) for later in self._until_next_use(item, phase))
        )

    def coming(self, name: str) -> frozenset[Item]:
        """Return the parts that must be in memory when the phase begins, and may be offloaded."""
        return self._phases[name].needs & self.offloadable

    def held(self) -> dict[str, frozenset[Item]]:
        """Return, for each phase, everything that is in memory while it runs in the steady state."""
        held = {item for phase in self.phases for item in phase.needs}
        in_phase: dict[str, frozenset[Item]] = {}

        # The second round starts from the result of the first, which is the steady state.
        for phase in (*self.phases, *self.phases):
            held = held - self.leaving(phase.name) | phase.needs
            in_phase[phase.name] = frozenset(held)

        return in_phase

    def until_moved(self, role: str, first: str) -> frozenset[str]:
        """Return the phases from `first` on, cyclically, until something of `role` is offloaded.

        A worker frees the message buffers of a weight sync when any part of its state leaves the device.
        """
        in_phase = self.held()
        names = list(self._phases)
        start = names.index(first)
        held = in_phase[first]
        kept = [first]

        for name in (*names[start + 1 :], *names[:start]):
            if any(item.role == role for item in held & self.leaving(name)):
                break
            held = in_phase[name]
            kept.append(name)

        return frozenset(kept)

    def takes_turns_with(self, role: str) -> tuple[str, ...]:
        """Return roles in other processes on the same devices, which must finish before `role` starts."""
        own = self._plan.group_of(role)
        return tuple(
            other for other in self._plan.on_same_devices(role) if self._plan.group_of(other) is not own
        )

    def are_fused(self, role: str, other: str) -> bool:
        """Return whether two roles share one process, which executes its calls in order."""
        return self._plan.group_of(role) is self._plan.group_of(other)

    def _until_next_use(self, item: Item, phase: Phase) -> Iterator[Phase]:
        """Yield the phases from `phase` on, cyclically, up to the one that needs the item."""
        step = list(self._phases.values())
        start = step.index(phase)

        for later in [*step[start:], *step[:start]]:
            if item in later.needs:
                return
            yield later

    def _must_be_out(self, item: Item, phase: Phase) -> bool:
        """Return whether an item cannot be in memory during a phase.

        An engine and a training model cannot be in memory together, nor can the gradients and optimizer
        states of two models. The state for a forward pass may stay with another model's.
        """
        if item in phase.needs:
            return False
        # Only roles on the same devices compete for memory.
        others = [
            need for need in phase.needs if need.role != item.role and need.role in self._sharing[item.role]
        ]
        if item.part == ENGINE or any(need.part == ENGINE for need in others):
            return bool(others)

        return item.part in _HEAVY and any(need.part in _HEAVY for need in others)
