"""Who is in memory: roles that share devices take turns, and the roles' own handles say when a turn begins.

The training loop knows nothing of this. In `hybrid` there are two modes. In rollout mode the trainer's state is away and the engines
are awake with its newest weights; in training mode the engines are asleep and of the trainer's state as much is in as was needed:

    generate     -> rollout mode
    log_probs    -> training mode, parameters in
    update       -> training mode, optimizer state and gradients in as well
    sync_weights -> rollout mode: gradients and optimizer away, engines awake, weights pushed, parameters away
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from megarl.controller.futures import gather
from megarl.controller.group import RoleGroup
from megarl.engine.offload import StatePart

Push = Callable[[Sequence[RoleGroup]], None]
_TO_TRAIN = (StatePart.gradients, StatePart.optimizer)


class Engines(Protocol):
    """What a turn needs of the rollout (workers/rollout.py)."""

    def update_weights(self, push: Push) -> None: ...

    def sleep(self) -> None: ...

    def resident_memory_gb(self) -> float: ...


class Residency:
    """Of roles with devices of their own: everybody stays. `TakingTurns` has the other behaviour."""

    def before_scoring(self) -> None:
        """The parameters of actor and reference are in when it returns."""

    def before_update(self) -> None:
        """All state of the actor is in when it returns."""

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
        """`memory/<actor|rollout>_rss_gb/<rollout|training>`: resident memory of the fullest process of the role (for an engine, with
        the processes it started) at the end of each mode, the last time; nothing where nobody takes turns."""
        return {}


EVERYBODY_STAYS = Residency()


class _Mode(str, Enum):
    rollout = "rollout"
    training = "training"


class TakingTurns(Residency):
    """Of actor, reference and engines on the same devices. All are in when they start: `make_room` before engines do.

    Moves are as few as can be. In a step that does not train the actor, its optimizer state stays away, and the engines get the
    weights again that they lost when they went to sleep.
    """

    def __init__(self, actor: RoleGroup, reference: RoleGroup | None) -> None:
        self._actor = actor
        self._trainers = [actor] if reference is None else [actor, reference]
        self._mode = _Mode.training
        self._actor_is_in = True
        self._engines: Engines | None = None
        self._push: Push | None = None
        self._resident_gb: dict[str, float] = {}

    def make_room(self) -> None:
        """Moves all of the trainer away: engines measure the free memory when they start. They are awake then, without weights."""
        _all(self._trainers, "offload_state", tuple(StatePart))
        self._mode, self._actor_is_in = _Mode.rollout, False

    def before_scoring(self) -> None:
        if self._mode is _Mode.training:
            return
        if self._engines is not None:
            self._measure()
            self._engines.sleep()
        _all(self._trainers, "restore_state", (StatePart.parameters,))
        self._mode, self._actor_is_in = _Mode.training, True

    def before_update(self) -> None:
        self.before_scoring()
        _all([self._actor], "restore_state", _TO_TRAIN)

    def before_generate(self) -> None:
        if self._mode is _Mode.training and self._engines is not None:
            self._enter_rollout()

    def send(self, engines: Engines, push: Push) -> None:
        self._engines, self._push = engines, push
        self._enter_rollout()

    def _enter_rollout(self) -> None:
        assert self._engines is not None
        if self._mode is _Mode.training:
            self._measure()
            _all([self._actor], "offload_state", _TO_TRAIN)
            _all(self._trainers[1:], "offload_state", (StatePart.parameters,))
        self._engines.update_weights(self._give)
        _all([self._actor], "offload_state", (StatePart.parameters,))
        self._mode, self._actor_is_in = _Mode.rollout, False

    def _give(self, replicas: Sequence[RoleGroup]) -> None:
        """Also to an engine that was started anew in the middle of rollout mode."""
        assert self._push is not None
        with self.actor_parameters():
            _all(replicas, "wake")
            self._push(replicas)

    @contextmanager
    def actor_parameters(self) -> Iterator[None]:
        if self._actor_is_in:
            yield
            return
        _all([self._actor], "restore_state", (StatePart.parameters,))
        yield  # after a failure they stay in: the engines' handle may mend it and ask again
        _all([self._actor], "offload_state", (StatePart.parameters,))

    def _measure(self) -> None:
        assert self._engines is not None
        sizes_gb = {"actor": max(_all([self._actor], "resident_memory_gb")), "rollout": self._engines.resident_memory_gb()}
        self._resident_gb |= {f"memory/{name}_rss_gb/{self._mode.value}": size for name, size in sizes_gb.items()}

    def metrics(self) -> dict[str, float]:
        return dict(self._resident_gb)


def _all(groups: Sequence[RoleGroup], method: str, *arguments: object) -> list:
    """Of all ranks of all groups at the same time."""
    return [result for ranks in gather(*(group.execute_all_async(method, *arguments) for group in groups)) for result in ranks]
