"""The phases of a PPO step as data, which of them may overlap, and which state is in memory in each. Pure.

A phase lists the roles that work in it, what it reads and writes, and what it needs in memory. The phases of
the models come from the role table (config/roles.py).

If roles share devices, state moves as rarely as possible. Steps repeat, so the next use of everything in
memory is known. State that a phase does not need is offloaded at the first phase on its devices after its
last use, but only if a phase before its next use cannot run with it in memory: it would have to be offloaded
anyway. So each part is loaded at most once and offloaded at most once between two uses, and state that is
never in the way stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from types import MappingProxyType
from typing import NamedTuple

from megarl.config import roles as table
from megarl.config.roles import SOURCE_TEACHER, TEACHER, Role, RolePhase, Stage, role_named
from megarl.plan.placement.placement_plan import PlacementPlan

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ENGINE = "engine"


class Item(NamedTuple):
    """One of the four parts of a role's memory. `ENGINE` is all of an inference engine, with its weights."""

    role: str
    part: str


class Phase(NamedTuple):
    """A phase of a step.

    Attributes:
        name: The name, as in the metric `timing_s/<name>`.
        roles: The roles that work. If there are none, the driver works.
        reads: The columns of the batch that it reads, and `<role>.weights`.
        writes: The columns and weights that it writes.
        needs: What must be in memory during the phase.
        calls: The methods of the first role's worker that compute it, if any.
    """

    name: str
    roles: tuple[str, ...]
    reads: frozenset[str]
    writes: frozenset[str]
    needs: frozenset[Item]
    calls: tuple[str, ...] = ()


def _phase(
    name: str, roles: Sequence[str], reads: str, writes: str, needs: Mapping[str, Sequence[str]], *calls: str
) -> Phase:
    items = frozenset(Item(role, part) for role, parts in needs.items() for part in parts)
    return Phase(name, tuple(roles), frozenset(reads.split()), frozenset(writes.split()), items, calls)


_TO_SCORE = (PARAMETERS,)
_TO_TRAIN = (PARAMETERS, GRADIENTS, OPTIMIZER)
_AWAKE = (ENGINE,)
_GENERATE = _phase(
    "gen",
    ["rollout"],
    "prompts rollout.weights",
    "responses rollout_log_probs",
    {"rollout": _AWAKE},
    "submit_and_poll",
)
_REWARD = _phase(
    "reward",
    ["reward"],
    "responses",
    "token_level_scores",
    {"reward": _TO_SCORE},
    "score",
    "begin",
    "scored",
    "forget",
    "finish",
    "use_judges",
)
_PUSH = _phase(
    "update_weights",
    ["actor", "rollout"],
    "actor.weights",
    "rollout.weights",
    {"actor": _TO_SCORE, "rollout": _AWAKE},
)


def step_phases(roles: Collection[str] = ()) -> tuple[Phase, ...]:
    """Return all phases of a step for all roles, in an order in which one process could run them.

    Args:
        roles: Roles of the run. Those of teachers of data sources are not in the table, and are added.
    """
    rows: list[Role] = []
    for row in table.ROLES:
        rows.append(row)
        if row.name == TEACHER:
            rows += [role_named(name) for name in roles if name.startswith(SOURCE_TEACHER)]

    def at(stage: Stage) -> list[Phase]:
        return [_of_role(role, phase) for role in rows for phase in role.phases if phase.stage is stage]

    scoring = (*at(Stage.reward), *at(Stage.score))
    columns = " ".join(["token_level_scores", *(column for phase in scoring for column in phase.writes)])
    advantages = _phase("adv", [], columns, "advantages returns", {})
    return (_GENERATE, _REWARD, *scoring, advantages, *at(Stage.update), *at(Stage.update_policy), _PUSH)


def _of_role(role: Role, phase: RolePhase) -> Phase:
    weights = f"{role.name}.weights"
    return Phase(
        name=phase.name,
        roles=(role.name,),
        reads=frozenset(("responses", weights, *phase.reads)),
        writes=frozenset((weights,) if phase.trains else phase.writes),
        needs=frozenset(Item(role.name, part) for part in (_TO_TRAIN if phase.trains else _TO_SCORE)),
        calls=phase.calls,
    )


def phases_of(roles: Collection[str]) -> tuple[Phase, ...]:
    """Return the phases of a run with these roles."""
    return tuple(phase for phase in step_phases(roles) if set(phase.roles) <= set(roles))


def waits_for(step: Sequence[Phase]) -> dict[str, frozenset[str]]:
    """Return, for each phase, the phases that must end before it begins, directly or transitively.

    A phase depends on another if it reads what the other writes, or writes what the other reads or writes.
    """
    before: dict[str, frozenset[str]] = {}
    for index, phase in enumerate(step):
        # Write after read, read after write and write after write all order two phases.
        direct = [
            earlier.name
            for earlier in step[:index]
            if earlier.writes & (phase.reads | phase.writes) or earlier.reads & phase.writes
        ]
        before[phase.name] = frozenset(direct).union(*(before[name] for name in direct))

    return before


def overlaps(plan: PlacementPlan, *, generates_ahead: bool = False) -> list[tuple[str, str]]:
    """Return the pairs of phases that may run at the same time.

    Neither depends on the other, and they share no device.

    Args:
        generates_ahead: Whether the samples of a step may come from older weights (async rollout), so that
            generation only has to wait for the weight sync.
    """
    step = [phase for phase in phases_of(plan.roles) if phase.roles]
    before = waits_for(phases_of(plan.roles))

    # Async rollout does not wait for training, but still for other phases of the rollout.
    return [
        (one.name, other.name)
        for one, other in combinations(step, 2)
        if (
            one.name not in before[other.name]
            or (generates_ahead and one.name == "gen" and "rollout" not in other.roles)
        )
        and not any(_in_the_way(plan, role, them) for role in one.roles for them in other.roles)
    ]


def _in_the_way(plan: PlacementPlan, role: str, other: str) -> bool:
    """Return whether two roles share a process or a device, which can do only one thing at a time."""
    return plan.group_of(role) is plan.group_of(other) or plan.share_devices(role, other)


# role -> method of the worker -> processes on a node. Other methods use all available threads.
AtWork = Mapping[str, Mapping[str, int]]
NO_LIMITS: AtWork = MappingProxyType({})
_WAITS = "reward"  # its process waits for others, which run the user's code


def at_work(plan: PlacementPlan) -> AtWork:
    """Return how many processes may work at the same time as each method of a worker.

    A phase that runs alone has all cores for its processes; overlapping phases share them. The result follows
    from the plan, never from the load.
    """
    overlapping = set(map(frozenset, overlaps(plan)))

    computing = {
        phase.name: (phase.calls, phase.roles)
        for phase in phases_of(plan.roles)
        if phase.calls and _WAITS not in phase.roles
    }
    table: dict[str, dict[str, int]] = {}

    for name, (calls, own) in computing.items():
        # Plan for the worst case: everything that may overlap with this phase runs at once.
        at_a_time = [other for other in computing if other == name or frozenset((name, other)) in overlapping]
        number = _on_fullest_node(plan, {role for each in at_a_time for role in computing[each][1]})
        for role in own:
            table.setdefault(role, {}).update(dict.fromkeys(calls, number))

    return table


def _on_fullest_node(plan: PlacementPlan, roles: set[str]) -> int:
    nodes = [process.node for process in plan.processes if roles.intersection(process.roles)]
    return max(map(nodes.count, nodes))


_HEAVY = (GRADIENTS, OPTIMIZER)


def _of_owners(phase: Phase, bases: Mapping[str, str]) -> Phase:
    """Return the phase with what it needs in memory of the roles that own it.

    A model without its adapters has no memory of its own.
    """
    needs = frozenset(item._replace(role=bases.get(item.role, item.role)) for item in phase.needs)
    return phase._replace(needs=needs)


class OffloadPlan:
    """The offload plan of a placement."""

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
