"""Process of a rollout replica on one of its nodes: a thin wrapper around an inference engine of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.controller.dispatch import Dispatch
from megarl.controller.worker import Worker, register
from megarl.machine.usage import trim_heap
from megarl.rollout.interface import (
    EnginePart,
    FailedRequest,
    FinishedRequest,
    GenerationRequest,
    RolloutEngine,
)
from megarl.rollout.nodes import EngineNode
from megarl.weights.manifest import manifest_name
from megarl.weights.plan import TensorSlices
from megarl.weights.receiver import EngineLink
from megarl.weights.tensors import Manifest, WeightTransferError


class RolloutWorker(Worker):
    """One replica. It has no usable weights until the first weight sync completes.

    A group is one engine, with one process on each of its nodes. The first one is called; the others keep the
    engine's ranks on their nodes.

    Args:
        build_engine: Builds the engine. If it spans several nodes, it is called with the keyword `node`.
    """

    def __init__(self, build_engine: Callable[..., EnginePart]) -> None:
        super().__init__()
        self._joined = ""  # name of the last weight source that the engine joined
        self._received = ""  # name of the source that the engine's weights were received from
        self._planned: Manifest = {}  # the tensors that `needed_slices` was asked for last
        self._joined_manifest: Manifest = {}  # the tensors of the joined source
        self._kept: tuple[str, Manifest] = ("", {})  # the tensors of folders, with their name
        self._part = build_engine() if self.world_size == 1 else build_engine(node=self._engine_node())

    def _engine_node(self) -> EngineNode:
        return EngineNode(
            self.rank, self.world_size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        )

    @property
    def _engine(self) -> RolloutEngine:
        assert isinstance(self._part, RolloutEngine), "only the first node of an engine is called"
        return self._part

    # ---- generation

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def submit_and_poll(
        self, requests: Sequence[GenerationRequest], wait_s: float
    ) -> list[FinishedRequest | FailedRequest]:
        """Submit requests, wait at most `wait_s` for one in flight to end, and return all that have."""
        self._engine.submit(requests)
        return [*self._engine.collect(wait_s), *self._engine.failed()]

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def abort(self, request_ids: Sequence[int]) -> None:
        """Cancel the requests that are still in flight."""
        self._engine.abort(request_ids)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def interrupt(self) -> None:
        """End the wait of a concurrent `submit_and_poll`."""
        self._engine.interrupt()

    # ---- weights (see RolloutEngine)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        """Return the slices of the manifest's tensors that each engine rank needs.

        The manifest is that of the source that joins next, so that its weight syncs do not send it again.
        """
        self._planned = manifest
        return self._engine.needed_slices(manifest)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def join_weights(self, links: Sequence[EngineLink], name: str) -> None:
        """Connect the engine's ranks to the source of their weights, under a name that is used once.

        Returns when all have connected.
        """
        # Until joining succeeds, a weight sync under any name must be refused.
        self._joined = ""
        self._engine.join_weights(links)
        self._joined = name
        self._joined_manifest = self._planned

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def receive_weights(
        self, version: int, name: str, first_round: int = 0, folder: str | None = None
    ) -> None:
        """Receive the weights while the trainers send them, from a round on (see `begin_weight_update`).

        Args:
            version: The version of the weights.
            name: The name of the connection.
            first_round: The first round that is sent.
            folder: The folder with what changed, if the trainers have written files.

        Raises WeightTransferError if `name` is not the last joined name.
        """
        if name != self._joined:
            raise WeightTransferError(
                "the engine has joined another trainer since; that trainer's WeightSync.close() releases it"
            )

        # Between begin and end, the engine has mixed weights and refuses to generate.
        self._received = ""
        self._engine.begin_weight_update(self._joined_manifest, first_round)
        self._engine.receive_weights(folder)
        self._engine.end_weight_update(version)
        self._received = name

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def load_folder(self, folder: str, manifest: Manifest | str, version: int) -> None:
        """Load all weights from a Hugging Face folder.

        Args:
            manifest: The tensors, or the name (manifest_name) of those that an earlier call has brought.
        """
        if not isinstance(manifest, str):
            self._kept = (manifest_name(manifest), manifest)
        elif manifest != self._kept[0]:
            raise WeightTransferError("the engine has loaded a folder of another source since")
        self._received = ""
        self._engine.begin_weight_update(self._kept[1])
        self._engine.load_folder(Path(folder))
        self._engine.end_weight_update(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def leave_weights(self) -> None:
        """Disconnect from the trainers."""
        self._joined = ""
        self._engine.leave_weights()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def checksums(self) -> dict[str, int]:
        return self._engine.checksums()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_version(self) -> int | None:
        return self._engine.weight_version

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def acknowledged_version(self, name: str) -> int | None:
        """Return the version of the weights if they are complete and came from the source `name`."""
        return self._engine.weight_version if self._received == name else None

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
