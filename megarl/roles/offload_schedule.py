"""Who is in memory: roles that share devices take turns, and the roles' own handles say when a phase begins.

The training loop knows nothing of this. What comes in and goes out in a phase is planned in placement/offload_plan.py; here it is done:

    generate      -> engines awake, with the newest weights; what trains on their devices is away
    log_probs ... -> engines asleep; the parameters of the role are in
    update        -> gradients and optimizer state are in as well; those of others on these devices are away
    sync_weights  -> engines awake, weights pushed; then the actor's parameters go too, where they are in the way
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from megarl.controller.futures import RemoteFuture, gather
from megarl.controller.group import RoleGroup
from megarl.engine.offload import StatePart
from megarl.placement.dataflow import ENGINE, PARAMETERS, Item
from megarl.placement.offload_plan import OffloadPlan

Push = Callable[[Sequence[RoleGroup]], None]
_GENERATE, _SEND = "gen", "update_weights"
_ENGINES = Item("rollout", ENGINE)
_ACTOR = Item("actor", PARAMETERS)


class Engines(Protocol):
    """What a turn needs of the rollout (roles/rollout.py)."""

    def update_weights(self, push: Push) -> None: ...

    def sleep(self) -> None: ...

    def resident_memory_gb(self) -> float: ...


class Residency:
    """Of roles with devices of their own: everybody stays. `TakingTurns` has the other behaviour."""

    def before(self, phase: str) -> list[RemoteFuture]:
        """What the phase needs in memory will be there when what is returned has ended; calls that are made now queue behind it."""
        return []

    def runs(self, phase: str, future: RemoteFuture) -> None:
        """`future` ends when the phase does."""

    def before_generate(self) -> None:
        """The engines are awake, with the weights that were sent last, when it returns."""

    @contextmanager
    def actor_parameters(self) -> Iterator[None]:
        """The actor's parameters are in within the block, whoever's turn it is."""
        yield

    def send(self, engines: Engines, push: Push) -> None:
        """New weights: `push` gives them to engines that can take them."""
        engines.update_weights(push)

    def metrics(self) -> dict[str, float]:
        """`memory/<group|rollout>_rss_gb/<rollout|training>`: resident memory of the fullest process of a group that shares devices
        with engines, named after its first role (for an engine, with the processes it started), at the end of each mode, the last
        time; nothing where nobody takes turns with engines."""
        return {}


EVERYBODY_STAYS = Residency()


class TakingTurns(Residency):
    """`models`: role -> its worker group, of all roles that have a model. What `turns.away_at_first` names is away when it is made.

    A failure of a move that is not waited for here is that of the phase, with whose future it goes.
    """

    def __init__(self, turns: OffloadPlan, models: Mapping[str, RoleGroup]) -> None:
        self._turns = turns
        self._models = dict(models)
        self._held: set[Item] = set()  # of `turns.movable`
        self._running: dict[str, RemoteFuture] = {}  # role -> what it does
        self._engines: Engines | None = None
        self._push: Push | None = None
        self._resident_gb: dict[str, float] = {}

    def before(self, phase: str) -> list[RemoteFuture]:
        roles = self._turns.phase(phase).roles
        self._wait_for_rivals(roles)
        moves = self._let_go(phase, roles)
        return [*moves, *self._bring_in(self._turns.coming(phase))]

    def runs(self, phase: str, future: RemoteFuture) -> None:
        for role in self._turns.phase(phase).roles:
            self._running[role] = future

    def before_generate(self) -> None:
        if self._push is not None and self._turns.engines_move and _ENGINES not in self._held:
            self._wake_with_weights()

    def send(self, engines: Engines, push: Push) -> None:
        self._engines, self._push = engines, push
        self._wake_with_weights()

    def _wake_with_weights(self) -> None:
        assert self._engines is not None
        self._wait_for_rivals(("rollout",))
        if self._turns.engines_move and _ENGINES not in self._held and self._resident_gb:
            self._measure("training")
        gather(*self._let_go(_SEND, ("rollout",)))
        self._engines.update_weights(self._give)
        self._held |= {_ENGINES} & self._turns.movable
        gather(*self._let_go(_GENERATE, ("rollout",)))

    def _give(self, replicas: Sequence[RoleGroup]) -> None:
        """Also to an engine that was started anew in the middle of rollout mode."""
        assert self._push is not None
        with self.actor_parameters():
            if self._turns.engines_move:
                gather(*(replica.execute_all_async("wake") for replica in replicas))
            self._push(replicas)

    @contextmanager
    def actor_parameters(self) -> Iterator[None]:
        if _ACTOR not in self._turns.movable or _ACTOR in self._held:
            yield
            return
        gather(*self._bring_in({_ACTOR}))
        yield  # after a failure they stay in: the engines' handle may mend it and ask again
        gather(*self._take_out({_ACTOR}))

    # ---- moves

    def _wait_for_rivals(self, roles: Sequence[str]) -> None:
        """What others do on the devices of `roles` has ended, well; raises its failure otherwise."""
        rivals = dict.fromkeys(rival for role in roles for rival in self._turns.rivals(role))
        gather(*(future for rival in rivals if (future := self._running.pop(rival, None)) is not None))

    def _let_go(self, phase: str, roles: Sequence[str]) -> list[RemoteFuture]:
        """All that leaves in `phase`. What leaves other processes than those of `roles` has left when it returns."""
        leaving = self._turns.leaving(phase) & self._held
        if _ENGINES in leaving:
            assert self._engines is not None
            self._measure("rollout")
            self._engines.sleep()
            self._held.discard(_ENGINES)
            leaving -= {_ENGINES}
        own = {item for item in leaving if any(self._turns.are_fused(item.role, role) for role in roles)}
        gather(*self._take_out(leaving - own))
        return self._take_out(own)

    def _take_out(self, items: set[Item] | frozenset[Item]) -> list[RemoteFuture]:
        self._held -= items
        return self._move("offload_state", items)

    def _bring_in(self, items: set[Item] | frozenset[Item]) -> list[RemoteFuture]:
        missing = items - self._held
        self._held |= missing
        return self._move("restore_state", missing)

    def _move(self, method: str, items: set[Item] | frozenset[Item]) -> list[RemoteFuture]:
        """One call for each role, its parts in the order of StatePart."""
        parts = {role: tuple(part for part in StatePart if Item(role, part.value) in items) for role in self._models}
        return [self._models[role].execute_all_async(method, moved) for role, moved in parts.items() if moved]

    # ---- what it shows

    def _measure(self, mode: str) -> None:
        assert self._engines is not None
        sizes_gb = {"rollout": self._engines.resident_memory_gb()}
        seen: set[str] = set()
        for role in self._turns.rivals("rollout"):
            if not any(self._turns.are_fused(role, other) for other in seen):
                seen.add(role)
                sizes_gb[role] = max(self._models[role].execute_all_sync("resident_memory_gb"))
        self._resident_gb |= {f"memory/{name}_rss_gb/{mode}": size for name, size in sizes_gb.items()}

    def metrics(self) -> dict[str, float]:
        return dict(self._resident_gb)
