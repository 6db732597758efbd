"""Who is in memory: roles that share devices take turns. Whoever works asks this schedule before its phase,
and it carries out the plan.

What comes in and goes out in a phase is planned in placement/offload_plan.py:

    generate       -> engines awake, with the newest weights; what trains on their devices is offloaded
    log_probs ...  -> engines asleep; the parameters of the role are in
    update         -> gradients and optimizer state are in as well; those of others on these devices are
                      offloaded
    update_weights -> engines awake, weights sent; then the actor's parameters go too, where they are in the
                      way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megarl.controller.futures import RemoteFuture, WorkerFuture, gather
from megarl.controller.group import RoleGroup
from megarl.controller.worker import RemoteMethod
from megarl.engine.offload import StatePart
from megarl.placement.dataflow import ENGINE, PARAMETERS, Item
from megarl.placement.offload_plan import OffloadPlan
from megarl.workers.megatron import MegatronWorker

_Parts = tuple[StatePart, ...]
_Move = RemoteMethod[[_Parts], int, [_Parts], WorkerFuture[list[int]]]
_GENERATE = "gen"
_SEND = "update_weights"
_ENGINES = Item("rollout", ENGINE)
_ACTOR = Item("actor", PARAMETERS)


class Engines(Protocol):
    """What the schedule moves of the rollout (roles/rollout/replicas.py)."""

    def sleep(self) -> None: ...

    def resident_memory_gb(self) -> float: ...


class OffloadSchedule:
    """`models`: role -> its worker group, of all roles that have a model. What `plan.offloaded_at_first`
    names is out when it is made.

    Without a plan every role has devices of its own, and nothing moves. A failure of a move that is not
    waited for here is that of the phase, with whose future it goes.
    """

    def __init__(
        self,
        plan: OffloadPlan | None = None,
        models: Mapping[str, RoleGroup] | None = None,
        engines: Engines | None = None,
    ) -> None:
        self._plan = plan
        self._models = dict(models or {})
        self._engines = engines
        self._held: set[Item] = set()  # of `plan.offloadable`
        self._running: dict[str, RemoteFuture] = {}  # role -> what it does
        self._resident_gb: dict[str, float] = {}
        self._actor_came_in = False  # for the push under way

    def before(self, phase: str) -> list[RemoteFuture]:
        """What the phase needs in memory will be there when what is returned has ended; calls that are made
        now queue behind it."""
        if self._plan is None:
            return []

        # Whoever works on these devices has to end before its state can leave them.
        roles = self._plan.phase(phase).roles
        self._wait_for_others(roles)
        moves = self._let_go(phase, roles)

        return [*moves, *self._bring_in(self._plan.coming(phase))]

    def runs(self, phase: str, future: RemoteFuture) -> None:
        """`future` ends when the phase does."""
        # The next phase on the same devices waits for this future.
        for role in self._plan.phase(phase).roles if self._plan is not None else ():
            self._running[role] = future

    def finish(self, role: str) -> None:
        """Waits until the role has done what it was asked last; raises its failure."""
        if (future := self._running.pop(role, None)) is not None:
            future.get()

    # ---- engines and their weights

    @property
    def engines_are_offloaded(self) -> bool:
        return self.engines_move and _ENGINES not in self._held

    @property
    def engines_move(self) -> bool:
        """Whether they give their memory to others at times."""
        return self._plan is not None and self._plan.engines_move

    @property
    def actor_is_offloaded(self) -> bool:
        """Whether the actor's parameters are out of memory, to make room for engines on its devices."""
        return self._plan is not None and _ACTOR in self._plan.offloadable and _ACTOR not in self._held

    def before_push(self) -> None:
        """Make the engines ready for weights: nobody else works on their devices, and the actor's parameters
        are in memory.

        Engines that are awake sleep first if the actor's parameters were offloaded for them, which have no
        room beside their caches.
        """
        if self._plan is None:
            return

        # The training phases on the engines' devices have to end first.
        self._wait_for_others(("rollout",))

        # This is the end of the training mode: measure it before anything moves.
        if self.engines_are_offloaded and self._resident_gb:
            self._measure("training")
        gather(*self._let_go(_SEND, ("rollout",)))
        if self.actor_is_offloaded and _ENGINES in self._held:
            self._put_engines_to_sleep()
        self._actor_came_in = self.bring_in_actor()

    def after_push(self) -> None:
        """The engines have their weights: what is in their way goes."""
        if self._plan is None:
            return

        # The actor goes out again if it was in memory only for this push.
        if self._actor_came_in:
            self.take_out_actor()
        self._held |= {_ENGINES} & self._plan.offloadable
        gather(*self._let_go(_GENERATE, ("rollout",)))

    def bring_in_actor(self) -> bool:
        """Bring the actor's parameters into memory, whoever's turn it is. Return whether they were out, and
        are to go out again."""
        if not self.actor_is_offloaded:
            return False
        gather(*self._bring_in({_ACTOR}))
        return True

    def take_out_actor(self) -> None:
        """The parts stay in memory after a failure, so that the caller can fix its cause and try again."""
        gather(*self._take_out({_ACTOR}))

    # ---- moves

    def _wait_for_others(self, roles: Sequence[str]) -> None:
        """What others do on the devices of `roles` has ended, well; raises its failure otherwise."""
        assert self._plan is not None
        others = dict.fromkeys(other for role in roles for other in self._plan.takes_turns_with(role))
        gather(*(future for other in others if (future := self._running.pop(other, None)) is not None))

    def _let_go(self, phase: str, roles: Sequence[str]) -> list[RemoteFuture]:
        """All that leaves in `phase`. What leaves other processes than those of `roles` has left when it
        returns."""
        assert self._plan is not None
        leaving = self._plan.leaving(phase) & self._held

        # Engines are not workers of a model, so they release their memory by another call.
        if _ENGINES in leaving:
            self._put_engines_to_sleep()
            leaving -= {_ENGINES}

        # A fused process runs its calls in order, so its own moves need no wait; those of others do.
        own = {item for item in leaving if any(self._plan.are_fused(item.role, role) for role in roles)}
        gather(*self._take_out(leaving - own))
        return self._take_out(own)

    def _put_engines_to_sleep(self) -> None:
        assert self._engines is not None
        self._measure("rollout")
        self._engines.sleep()
        self._held.discard(_ENGINES)

    def _take_out(self, items: set[Item] | frozenset[Item]) -> list[RemoteFuture]:
        self._held -= items
        return self._move(MegatronWorker.offload_state, items)

    def _bring_in(self, items: set[Item] | frozenset[Item]) -> list[RemoteFuture]:
        # Record before the calls are made: a second phase must not move the same parts again.
        missing = items - self._held
        self._held |= missing
        return self._move(MegatronWorker.restore_state, missing)

    def _move(self, method: _Move, items: set[Item] | frozenset[Item]) -> list[RemoteFuture]:
        """One call for each role, its parts in the order of StatePart."""
        parts = {
            role: tuple(part for part in StatePart if Item(role, part.value) in items)
            for role in self._models
        }
        return [self._models[role].call(method, moved) for role, moved in parts.items() if moved]

    # ---- what it shows

    def _measure(self, mode: str) -> None:
        assert self._plan is not None
        assert self._engines is not None
        sizes_gb = {"rollout": self._engines.resident_memory_gb()}
        seen: set[str] = set()

        # Fused roles share a process, so one of them stands for all.
        for role in self._plan.takes_turns_with("rollout"):
            if not any(self._plan.are_fused(role, other) for other in seen):
                seen.add(role)
                sizes_gb[role] = max(self._models[role].call(MegatronWorker.resident_memory_gb))

        self._resident_gb |= {f"memory/{name}_rss_gb/{mode}": size for name, size in sizes_gb.items()}

    def metrics(self) -> dict[str, float]:
        """`memory/<group|rollout>_rss_gb/<rollout|training>`: resident memory of the fullest process of a
        group that shares devices with engines, named after its first role (for an engine, with the processes
        it started), at the end of each mode, the last time; nothing where nobody takes turns with engines."""
        return dict(self._resident_gb)
