"""The process of one rollout replica: a thin shell around an inference engine of any kind."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.controller.dispatch import Dispatch
from megarl.controller.register import register
from megarl.controller.worker import Worker
from megarl.machine.memory import trim_heap
from megarl.rollout.interface import EngineDeadError, FinishedRequest, GenerationRequest, RolloutEngine
from megarl.weights.bucket import GroupAddress, Parcel
from megarl.weights.receipt import Manifest, WeightTransferError
from megarl.weights.stream import WeightStream


class RolloutWorker(Worker):
    """One replica, alone in its group. It holds no usable weights until the first weight update ends."""

    def __init__(self, build_engine: Callable[[], RolloutEngine]) -> None:
        super().__init__()
        self._engine = build_engine()
        self._engine_processes = self._engine.process_ids()
        self._stream_names: list[str] = []  # of those that the engine has joined

    # ---- generation

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def submit_and_poll(self, requests: Sequence[GenerationRequest], wait_s: float) -> list[FinishedRequest]:
        """Takes new requests, waits at most `wait_s` for one of those in flight to finish, and gives back all that have."""
        self._engine.submit(requests)
        return self._engine.collect(wait_s)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def abort(self) -> None:
        """Forgets all requests in flight."""
        self._engine.abort()

    # ---- weights: see RolloutEngine

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def begin_weight_update(self, manifest: Manifest) -> None:
        self._engine.begin_weight_update(manifest)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def load_weights(self, parcels: Sequence[Parcel]) -> None:
        self._engine.load_weights(parcels)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def load_streams(self, version: int, names: Sequence[str]) -> bool:
        """Where they are loaded, ends the update as well, without another call in between.

        Raises WeightTransferError where `names` are not the streams that were joined last: another trainer has the engine.
        """
        if list(names) != self._stream_names:
            raise WeightTransferError(
                "the engine has joined the weight streams of another trainer since; WeightSync.close() of that one lets it go"
            )
        is_complete = self._engine.load_streams()
        if is_complete:
            self._engine.end_weight_update(version)
        return is_complete

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def load_folder(self, folder: str) -> None:
        self._engine.load_folder(Path(folder))

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def end_weight_update(self, version: int) -> None:
        self._engine.end_weight_update(version)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def join_weight_group(self, address: GroupAddress, first_rank: int) -> None:
        self._engine.join_weight_group(address, first_rank)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def join_weight_streams(self, streams: Sequence[WeightStream], first_rank: int) -> None:
        self._engine.join_weight_streams(streams, first_rank)
        self._stream_names = [stream.address.name for stream in streams]

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def leave_weight_groups(self) -> None:
        self._engine.leave_weight_groups()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def checksums(self) -> dict[str, int]:
        return self._engine.checksums()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def num_ranks(self) -> int:
        return self._engine.num_ranks

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_version(self) -> int | None:
        return self._engine.weight_version

    # ---- memory, life and death

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def sleep(self) -> None:
        """Gives the engine's memory back. Nothing where it sleeps."""
        self._engine.sleep()
        trim_heap()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def wake(self) -> None:
        """Nothing where the engine is awake, as one that was started anew is."""
        self._engine.wake()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def process_ids(self) -> list[int]:
        """Of this process and of those that the engine consists of."""
        return [os.getpid(), *self._engine.process_ids()]

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def check_health(self) -> None:
        """Raises EngineDeadError where a process that the engine started with is gone."""
        gone = [pid for pid in self._engine_processes if not _runs(pid)]
        if gone:
            raise EngineDeadError(f"of the engine's processes {self._engine_processes}, {gone} are gone")


def _runs(pid: int) -> bool:
    """A process that has ended and that nobody has asked about yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
