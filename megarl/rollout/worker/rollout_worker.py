"""Process of a rollout replica on one of its nodes: a thin wrapper around an inference engine of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import register
from megarl.machine.usage import trim_heap
from megarl.rollout.interface import (
    EndedRequest,
    EnginePart,
    GenerationRequest,
    RolloutEngine,
)
from megarl.rollout.nodes import EngineNode
from megarl.weights.sync.worker import WeightImport


class RolloutWorker(WeightImport):
    """One replica. It has no usable weights until the first weight sync completes.

    A group is one engine, with one process on each of its nodes. The first one is called; the others keep the
    engine's ranks on their nodes.

    Args:
        build_engine: Builds the engine. If it spans several nodes, it is called with the keyword `node`.
    """

    def __init__(self, build_engine: Callable[..., EnginePart]) -> None:
        super().__init__()
        if self.world_size == 1:
            self._part = build_engine()
        else:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._part = build_engine(node=EngineNode(self.rank, self.world_size, *address))

    @property
    def _engine(self) -> RolloutEngine:
        assert isinstance(self._part, RolloutEngine), "only the first node of an engine is called"
        return self._part

    # ---- generation

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def submit_and_poll(self, requests: Sequence[GenerationRequest], wait_s: float) -> Sequence[EndedRequest]:
        """Submit requests, wait at most `wait_s` for one in flight to end, and return all that have."""
        self._engine.submit(requests)
        return self._engine.collect(wait_s)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def abort(self, request_ids: Sequence[int]) -> None:
        """Cancel the requests that are still in flight."""
        self._engine.abort(request_ids)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def interrupt(self) -> None:
        """End the wait of a concurrent `submit_and_poll`."""
        self._engine.interrupt()

    # ---- memory and process lifetime

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def sleep(self) -> None:
        """Free the engine's memory. Does nothing if the engine is asleep."""
        self._engine.sleep()

        # The allocator caches freed memory; other processes need it now.
        trim_heap()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def wake(self) -> None:
        """Allocate the memory of the weights again.

        Does nothing if the engine is awake, as after a restart.
        """
        self._engine.wake()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def wake_cache(self) -> None:
        """Allocate the memory of the KV cache again. Does nothing if the engine has it."""
        self._engine.wake_cache()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def process_ids(self) -> list[int]:
        """Return the ids of this process and the engine's processes."""
        return [os.getpid(), *self._part.process_ids()]
