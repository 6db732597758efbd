"""Lifecycle of an engine: the states between "has no weights" and "closed", and when it may generate.

It is the same for every engine.
"""

from __future__ import annotations

from enum import Enum
from math import prod

from megarl.weights.tensors import Manifest, WeightReceipt


class EngineStateError(RuntimeError):
    """The engine cannot do what it was asked in its state.

    The message names the state and how to leave it.
    """


class LifecycleState(Enum):
    EMPTY = "empty"
    UPDATING = "updating"
    READY = "ready"
    ASLEEP = "asleep"
    CLOSED = "closed"


_HINT = {
    LifecycleState.EMPTY: "it has no complete weights: complete a weight update",
    LifecycleState.UPDATING: "its weights are partially loaded: complete the weight update, or restart it",
    LifecycleState.READY: "it has complete weights: begin a weight update first",
    LifecycleState.ASLEEP: "it has released its memory: wake it, then update its weights",
    LifecycleState.CLOSED: "it is closed: start another engine",
}


class EngineLifecycle:
    """State, version of the weights, and receipt of the last update, unless a receiver counted it."""

    def __init__(self) -> None:
        self.state = LifecycleState.EMPTY
        self.weight_version: int | None = None
        self._receipt: WeightReceipt | None = None

    def require_ready(self) -> int:
        """Return the version of the weights. Raises EngineStateError if they are not complete."""
        self.require("generate", LifecycleState.READY)
        assert self.weight_version is not None
        return self.weight_version

    def begin(self, manifest: Manifest, is_partial: bool = False) -> None:
        """Begin an update; a partial one keeps some of the tensors, which must be complete."""
        incomplete = () if is_partial else (LifecycleState.EMPTY, LifecycleState.UPDATING)
        self.require("begin a weight update", *incomplete, LifecycleState.READY)
        # From here on, no sample may be written, whatever the outcome of the update.
        self.state = LifecycleState.UPDATING
        self.weight_version = None
        self._receipt = WeightReceipt(manifest)

    def require_update(self) -> None:
        self.require("load weights", LifecycleState.UPDATING)

    def record(self, tensors: Manifest) -> None:
        """Record tensors before they are copied.

        Raises WeightTransferError if one does not belong to the update.
        """
        self.require_update()
        assert self._receipt is not None
        for name, meta in tensors.items():
            self._receipt.record(name, 0, prod(meta.shape), meta.dtype)

    def complete(self) -> None:
        """Record that everything has arrived, as the receiver has counted."""
        self._receipt = None

    def end(self, version: int) -> None:
        self.require("end a weight update", LifecycleState.UPDATING)
        # close() raises for missing tensors and must then leave the engine without weights.
        self.state = LifecycleState.EMPTY
        if self._receipt is not None:
            self._receipt.close()
        self.state = LifecycleState.READY
        self.weight_version = version

    def must_wake(self) -> bool:
        """Return whether it sleeps. Raises EngineStateError if it is closed."""
        self.require(
            "wake", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY, LifecycleState.ASLEEP
        )
        return self.state is LifecycleState.ASLEEP

    def leave(self, state: LifecycleState) -> None:
        """Change to a state without weights: EMPTY, ASLEEP or CLOSED."""
        self.state = state
        self.weight_version = None
        self._receipt = None

    def require(self, action: str, *states: LifecycleState) -> None:
        if self.state not in states:
            raise EngineStateError(
                f"the engine cannot {action} while {self.state.value}: {_HINT[self.state]}"
            )
