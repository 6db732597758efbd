"""The process of one rollout replica: a thin shell around an inference engine of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.machine.usage import trim_heap
from megarl.rollout.interface import FailedRequest, FinishedRequest, GenerationRequest, RolloutEngine
from megarl.weights.plan import TensorSlices
from megarl.weights.receiver import EngineLink
from megarl.weights.tensors import Manifest, WeightTransferError


class RolloutWorker(Worker):
    """One replica, alone in its group. It holds no usable weights until the first weight update ends."""

    def __init__(self, build_engine: Callable[[], RolloutEngine]) -> None:
        super().__init__()
        self._engine = build_engine()
        self._joined = ""  # the name under which it was told last where its weights come from

    # ---- generation

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def submit_and_poll(
        self, requests: Sequence[GenerationRequest], wait_s: float
    ) -> list[FinishedRequest | FailedRequest]:
        """Takes new requests, waits at most `wait_s` for one of those in flight to finish or to fail, and
        gives back all that have."""
        self._engine.submit(requests)
        return [*self._engine.collect(wait_s), *self._engine.failed()]

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def abort(self, request_ids: Sequence[int]) -> None:
        """Forgets those of the requests that are in flight."""
        self._engine.abort(request_ids)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def interrupt(self) -> None:
        """Ends the wait of a `submit_and_poll` that runs at the same time."""
        self._engine.interrupt()

    # ---- weights: see RolloutEngine

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        """What each of the engine's ranks keeps of a model with these tensors."""
        return self._engine.needed_slices(manifest)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def join_weights(self, links: Sequence[EngineLink], name: str) -> None:
        """Where the engine's ranks get their weights from, under a name that is used once; returns when all
        are there."""
        # Until joining succeeds, a push under any name must be refused.
        self._joined = ""
        self._engine.join_weights(links)
        self._joined = name

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def receive_weights(self, manifest: Manifest, version: int, name: str) -> None:
        """All weights, while the trainers send them. Raises WeightTransferError where `name` is not what was
        joined last."""
        if name != self._joined:
            raise WeightTransferError(
                "the engine has joined another trainer since; WeightSync.close() of that one lets it go"
            )

        # Between begin and end the engine has mixed weights and refuses to generate.
        self._engine.begin_weight_update(manifest)
        self._engine.receive_weights()
        self._engine.end_weight_update(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def load_folder(self, folder: str, manifest: Manifest, version: int) -> None:
        """All weights, from a Hugging Face folder."""
        self._engine.begin_weight_update(manifest)
        self._engine.load_folder(Path(folder))
        self._engine.end_weight_update(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def leave_weights(self) -> None:
        """Lets go of the trainers."""
        self._joined = ""
        self._engine.leave_weights()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def checksums(self) -> dict[str, int]:
        return self._engine.checksums()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_version(self) -> int | None:
        return self._engine.weight_version

    # ---- memory, life and death

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def sleep(self) -> None:
        """Gives the engine's memory back. Nothing where it sleeps."""
        self._engine.sleep()

        # The allocator keeps freed memory; other processes need it now.
        trim_heap()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def wake(self) -> None:
        """Allocate the memory of the weights again. Does nothing if the engine is awake, as a restarted one
        is."""
        self._engine.wake()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def wake_cache(self) -> None:
        """Takes the memory of the cache again. Nothing where the engine has it."""
        self._engine.wake_cache()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def process_ids(self) -> list[int]:
        """Of this process and of those that the engine consists of."""
        return [os.getpid(), *self._engine.process_ids()]
