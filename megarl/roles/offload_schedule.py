"""Schedule of offloading for roles that time-share devices.

A role calls it before each phase, and it carries out the plan.

plan/placement/dataflow.py plans what is loaded and offloaded in each phase:

    generate       -> engines awake with the newest weights; models trained on their devices are offloaded
    log_probs ...  -> engines asleep; the parameters of the role are loaded
    update         -> gradients and optimizer state are loaded as well; those of other roles on these
                      devices are offloaded
    update_weights -> engines awake, weights sent; then the actor's parameters are offloaded if the engines
                      need the memory
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megarl.controller.futures import DerivedFuture, RemoteFuture, WorkerFuture, gather
from megarl.controller.group import RoleGroup
from megarl.engine.offload import StatePart
from megarl.plan.placement.dataflow import ENGINE, PARAMETERS, Item, OffloadPlan
from megarl.roles.megatron_worker import MegatronWorker
from megarl.rollout.driver.replicas import Replicas

_GENERATE = "gen"
_SEND = "update_weights"
_ENGINES = Item("rollout", ENGINE)
_ACTOR = Item("actor", PARAMETERS)


class OffloadSchedule:
    """Executor of an offload plan.

    Without a plan, every role has its own devices and nothing moves. If a move that is not awaited here
    fails, the error is raised by the future of the phase.

    Args:
        plan: The plan. Everything in `plan.offloaded_at_first` must be offloaded already.
        models: Worker groups of all roles with a model, by role.
    """

    def __init__(
        self,
        plan: OffloadPlan | None = None,
        models: Mapping[str, RoleGroup] | None = None,
        engines: Replicas | None = None,
    ) -> None:
        self._plan = plan
        self._models = dict(models or {})
        self._engines = engines
        self._held: set[Item] = set()  # subset of `plan.offloadable` that is loaded
        self._running: dict[str, RemoteFuture] = {}  # role -> its running call
        self._resident_gb: dict[str, float] = {}
        self._actor_came_in = False  # for the weight sync in progress

    def before(self, phase: str) -> list[RemoteFuture]:
        """Prepare the memory for a phase.

        Returns:
            Futures of the moves. The memory is ready when they have completed; calls made now run after
            them.
        """
        if self._plan is None:
            return []

        # Calls on these devices must end before their state can be offloaded.
        roles = self._plan.phase(phase).roles
        self._wait_for_others(roles)
        return [*self._let_go(phase, roles), *self._bring_in(self._plan.coming(phase))]

    def run(
        self, phase: str, call: Callable[[], list[WorkerFuture[Any]]], combine: Callable[[list[Any]], Any]
    ) -> DerivedFuture:
        """Prepare the memory for a phase, and run it.

        Args:
            phase: A phase of plan/placement/dataflow.py.
            call: Makes the calls of the phase, which run after the moves.
            combine: Returns the result of the phase, given those of the calls.
        """
        moves = self.before(phase)
        calls = call()
        future = DerivedFuture([*calls, *moves], lambda results: combine(results[: len(calls)]))

        # The next phase on the same devices waits for this future.
        for role in self._plan.phase(phase).roles if self._plan is not None else ():
            self._running[role] = future
        return future

    def finish(self, role: str) -> None:
        """Wait for the role's last call, and raise its error."""
        if (future := self._running.pop(role, None)) is not None:
            future.get()

    # ---- engines and their weights

    @property
    def engines_are_offloaded(self) -> bool:
        return self.engines_move and _ENGINES not in self._held

    @property
    def engines_move(self) -> bool:
        """Whether the engines are offloaded at times."""
        return self._plan is not None and self._plan.engines_move

    @property
    def actor_is_offloaded(self) -> bool:
        """Whether the actor's parameters are offloaded to make room for engines on its devices."""
        return self._plan is not None and _ACTOR in self._plan.offloadable and _ACTOR not in self._held

    def before_push(self) -> None:
        """Prepare the engines for a weight sync.

        Afterwards no other role works on their devices, and the actor's parameters are loaded.

        If the actor's parameters were offloaded for engines that are awake, these engines sleep first, since
        the parameters do not fit next to their KV caches.
        """
        if self._plan is None:
            return

        # The training phases on the engines' devices must end first.
        self._wait_for_others(("rollout",))

        # Training mode ends here: measure it before anything moves.
        if self.engines_are_offloaded and self._resident_gb:
            self._measure("training")
        gather(*self._let_go(_SEND, ("rollout",)))
        if self.actor_is_offloaded and _ENGINES in self._held:
            self._put_engines_to_sleep()
        self._actor_came_in = self.bring_in_actor()

    def after_push(self) -> None:
        """Finish a weight sync: offload what the engines need room for."""
        if self._plan is None:
            return

        # Offload the actor again if it was loaded only for this sync.
        if self._actor_came_in:
            self.take_out_actor()
        self._held |= {_ENGINES} & self._plan.offloadable
        gather(*self._let_go(_GENERATE, ("rollout",)))

    def bring_in_actor(self) -> bool:
        """Load the actor's parameters, whatever the current phase is.

        Returns whether they were offloaded and must be offloaded again.
        """
        if not self.actor_is_offloaded:
            return False
        gather(*self._bring_in({_ACTOR}))
        return True

    def take_out_actor(self) -> None:
        """Offload the actor's parameters.

        If this fails, they stay loaded, so that the caller can fix the cause and retry.
        """
        gather(*self._take_out({_ACTOR}))

    # ---- recovery

    def make_room(self, roles: Collection[str]) -> None:
        """Forget all calls in progress, and offload what other roles hold on the devices of `roles`.

        Call this before the processes of `roles` are started again.
        """
        self._running.clear()
        self._actor_came_in = False
        if self._plan is None:
            return
        others = {other for role in roles for other in self._plan.takes_turns_with(role)} - set(roles)
        leaving = {item for item in self._held if item.role in others}

        # The engines lose their weights, and get them again before they generate.
        if _ENGINES in leaving:
            assert self._engines is not None
            self._engines.sleep()
            self._held.discard(_ENGINES)
        gather(*self._take_out(leaving - {_ENGINES}))

    def restarted(self, roles: Collection[str]) -> None:
        """Record that the processes of `roles` are new, with everything that can be offloaded offloaded."""
        self._held = {item for item in self._held if item.role not in roles}

    def takes_turns(self, role: str, other: str) -> bool:
        """Return whether two roles share devices from different processes."""
        return self._plan is not None and other in self._plan.takes_turns_with(role)

    # ---- moves

    def _wait_for_others(self, roles: Sequence[str]) -> None:
        """Wait for other roles' calls on the devices of `roles`, and raise their errors."""
        assert self._plan is not None
        others = dict.fromkeys(other for role in roles for other in self._plan.takes_turns_with(role))
        gather(*(future for other in others if (future := self._running.pop(other, None)) is not None))

    def _let_go(self, phase: str, roles: Sequence[str]) -> list[RemoteFuture]:
        """Offload everything that must leave in `phase`.

        Moves in processes that do not belong to `roles` have completed on return.
        """
        assert self._plan is not None
        leaving = self._plan.leaving(phase) & self._held

        # Engines are not model workers, so they release their memory by another call.
        if _ENGINES in leaving:
            self._put_engines_to_sleep()
            leaving -= {_ENGINES}

        # A fused process runs its calls in order, so its own moves need no waiting; those of others do.
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
        return [
            self._models[role].call(MegatronWorker.offload_state, parts)
            for role, parts in self._parts_of(items).items()
        ]

    def _bring_in(self, items: set[Item] | frozenset[Item]) -> list[RemoteFuture]:
        # Record the state before the calls are made: a second phase must not move the same parts again.
        missing = items - self._held
        self._held |= missing
        return [
            self._models[role].call(MegatronWorker.restore_state, parts)
            for role, parts in self._parts_of(missing).items()
        ]

    def _parts_of(self, items: set[Item] | frozenset[Item]) -> dict[str, tuple[StatePart, ...]]:
        """Return the parts of each role that has any, in the order of StatePart."""
        parts = {
            role: tuple(part for part in StatePart if Item(role, part.value) in items)
            for role in self._models
        }
        return {role: own for role, own in parts.items() if own}

    # ---- metrics

    def _measure(self, mode: str) -> None:
        assert self._plan is not None
        assert self._engines is not None
        sizes_gb = {"rollout": self._engines.resident_memory_gb()}
        seen: set[str] = set()

        # Fused roles share a process, so measure one of them.
        for role in self._plan.takes_turns_with("rollout"):
            if not any(self._plan.are_fused(role, other) for other in seen):
                seen.add(role)
                sizes_gb[role] = max(self._models[role].call(MegatronWorker.resident_memory_gb))

        self._resident_gb |= {f"memory/{name}_rss_gb/{mode}": size for name, size in sizes_gb.items()}

    def metrics(self) -> dict[str, float]:
        """Return `memory/<group|rollout>_rss_gb/<rollout|training>`.

        The value is the resident memory of the fullest process of a group that shares devices with engines,
        at the last end of each mode. A group is named after its first role; an engine includes the processes
        that it started. The result is empty if no role shares devices with engines.
        """
        return dict(self._resident_gb)
