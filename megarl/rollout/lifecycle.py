"""When an engine may generate: the states between "has no weights" and "closed", the same for every
engine."""

from __future__ import annotations

from enum import Enum
from math import prod

import torch

from megarl.weights.tensors import ChunkMeta, Manifest, WeightReceipt


class EngineStateError(RuntimeError):
    """The engine was asked for what it cannot do in its state; the message says the state and what leads out
    of it."""


class LifecycleState(Enum):
    EMPTY = "empty"
    UPDATING = "updating"
    READY = "ready"
    ASLEEP = "asleep"
    CLOSED = "closed"


_HINT = {
    LifecycleState.EMPTY: "it has no complete weights: run a weight update to its end",
    LifecycleState.UPDATING: "its weights are half loaded: end the weight update, or start it again",
    LifecycleState.READY: "it has complete weights: begin a weight update first",
    LifecycleState.ASLEEP: "it gave its memory back: wake it, then update its weights",
    LifecycleState.CLOSED: "it is closed: start another",
}


class EngineLifecycle:
    """The state, the version of the weights, and the receipt of the update under way."""

    def __init__(self) -> None:
        self.state = LifecycleState.EMPTY
        self._version: int | None = None
        self._receipt: WeightReceipt | None = None

    @property
    def weight_version(self) -> int | None:
        return self._version

    def require_ready(self) -> int:
        """The version of the weights. Raises EngineStateError where they are not complete."""
        self.require("generate", LifecycleState.READY)
        assert self._version is not None
        return self._version

    def begin(self, manifest: Manifest) -> None:
        self.require(
            "begin a weight update", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY
        )
        # From here on no sample may be written, whatever becomes of the update.
        self.state = LifecycleState.UPDATING
        self._version = None
        self._receipt = WeightReceipt(manifest)

    def require_update(self) -> None:
        self.require("load weights", LifecycleState.UPDATING)

    def record(self, chunk: ChunkMeta, dtype: torch.dtype) -> None:
        """Before the chunk is copied. Raises WeightTransferError for one that does not belong."""
        self.require_update()
        assert self._receipt is not None
        self._receipt.record(chunk, dtype)

    def record_all(self) -> None:
        """Everything has arrived, as whoever received it has counted."""
        self.require_update()
        assert self._receipt is not None
        for name, meta in self._receipt.manifest.items():
            self._receipt.record(ChunkMeta(name, 0, prod(meta.shape)), meta.dtype)

    def end(self, version: int) -> None:
        self.require("end a weight update", LifecycleState.UPDATING)
        assert self._receipt is not None
        # close() raises for missing tensors and must then leave the engine without weights.
        receipt = self._receipt
        self._receipt = None
        self.state = LifecycleState.EMPTY
        receipt.close()
        self.state = LifecycleState.READY
        self._version = version

    def must_wake(self) -> bool:
        """Whether it sleeps. Raises EngineStateError where it is closed."""
        self.require(
            "wake", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY, LifecycleState.ASLEEP
        )
        return self.state is LifecycleState.ASLEEP

    def leave(self, state: LifecycleState) -> None:
        """Into a state without weights: EMPTY, ASLEEP or CLOSED."""
        self.state = state
        self._version = None
        self._receipt = None

    def require(self, action: str, *states: LifecycleState) -> None:
        if self.state not in states:
            raise EngineStateError(
                f"the engine cannot {action} while {self.state.value}: {_HINT[self.state]}"
            )
