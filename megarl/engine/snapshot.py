"""Copy the training state of a rank to memory that outlives its process, and load it in a new process.

The state is the one that a checkpoint stores (checkpoint.py). A rank with the same layout loads its own
snapshot, with its random state; ranks with another layout load parts of several. No rank communicates.
"""

from __future__ import annotations

import io
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megarl.checkpoints.snapshot_file import (
    SnapshotFile,
    SnapshotTensor,
    WantedTensor,
    open_snapshot,
    write_snapshot,
)
from megarl.engine import platform
from megarl.engine.checkpoint import random_state, set_random_state, trained_shards
from megarl.engine.engine import MegatronEngine
from megarl.engine.offload import OffloadableState, StatePart
from megarl.engine.sharding import Shard
from megarl.machine.background import in_background
from megarl.machine.errors import CheckpointError

_STAGED_BYTES = 64 * 2**20  # of each buffer
_LEAST_STAGED_BYTES = 2**20  # below, the start of a copy takes longer than the copy
_NUM_PARTS = 4  # of a tensor that fits into a buffer, so that copies to and from the buffers overlap


class Staging:
    """Two buffers of pinned host memory, through which a GPU's tensors are copied into ordinary memory.

    A copy from the device to memory that is not pinned passes a small buffer of the driver, at a fraction of
    the speed. While one buffer is filled from the device, the other one is emptied.
    """

    def __init__(self, nbytes: int = _STAGED_BYTES, least: int = _LEAST_STAGED_BYTES) -> None:
        self._least = least
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]
        # They are pinned as long as the process lives, because pinning takes longer than copying.
        for buffer in self._buffers:
            platform.current().pin(buffer)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a contiguous tensor into a contiguous host tensor of the same size and dtype. Waits for it."""
        if not source.numel():
            return
        from_bytes = source.reshape(-1).view(torch.uint8)
        to_bytes = target.view(-1).view(torch.uint8)
        size = min(max(-(-from_bytes.numel() // _NUM_PARTS), self._least), self._buffers[0].numel())
        filled: deque[tuple[torch.Tensor, torch.Tensor, torch.Event | None]] = deque()

        for number, (part, place) in enumerate(
            zip(from_bytes.split(size), to_bytes.split(size), strict=True)
        ):
            # The buffer was emptied two parts ago.
            buffer = self._buffers[number % 2][: part.numel()]
            buffer.copy_(part, non_blocking=True)
            filled.append((buffer, place, _recorded_event(part)))
            if len(filled) == 2:
                _empty(*filled.popleft())
        while filled:
            _empty(*filled.popleft())


def _recorded_event(tensor: torch.Tensor) -> torch.Event | None:
    """Return an event after the work that is queued on the tensor's GPU; None on a CPU."""
    return torch.cuda.current_stream().record_event() if tensor.is_cuda else None


def _empty(buffer: torch.Tensor, place: torch.Tensor, is_filled: torch.Event | None) -> None:
    if is_filled is not None:
        is_filled.synchronize()
    place.copy_(buffer)


class PendingSnapshot:
    """A snapshot that is copied while the model is used.

    The state must not change before `wait` returns. It may be offloaded within `stands_still`, and what has
    not been copied yet is then copied from the host.

    Args:
        path: The file in memory.
        staging: The buffers through which tensors of a GPU pass; None copies directly, as on a CPU.
    """

    def __init__(self, path: str, step: int, engine: MegatronEngine, staging: Staging | None = None) -> None:
        # The random state changes with the next use of the model, so it is read now.
        record = {"counts": engine.optimizer.counts(), "random": random_state()}
        torch.save(record, buffer := io.BytesIO())

        self._path = path
        self._step = step
        self._record = buffer.getvalue()
        self._lock = threading.Lock()  # held while a tensor is copied
        places = engine.places  # waits for updated parameters, which the thread must not do
        self._tensors = [self._copied(shard, places, staging) for shard in trained_shards(engine)]

        # The copies are queued on the current stream, and must end before the thread reads them.
        self._stream = torch.cuda.Stream() if platform.current().is_cuda else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

        self._work = in_background(self._run, f"snapshot of step {step}")

    def wait(self) -> None:
        """Wait until everything is copied.

        Raises:
            CheckpointError: The memory of the node is exhausted.
        """
        failure = self._work.exception()
        if failure is not None:
            # The cause tells whether the GPU has failed.
            raise CheckpointError(
                f"the snapshot of step {self._step} cannot be written: {failure}"
            ) from failure

    def stands_still(self) -> AbstractContextManager[bool]:
        """Copy nothing within the context, in which tensors may be moved between the device and the host."""
        return self._lock

    def _run(self) -> None:
        # Copies on a stream of their own do not wait for the model's.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            write_snapshot(self._path, self._step, self._tensors, self._record)

    def _copied(
        self, shard: Shard, places: OffloadableState, staging: Staging | None
    ) -> tuple[SnapshotTensor, Callable[[torch.Tensor], None]]:
        def copy_to(target: torch.Tensor) -> None:
            with self._lock:
                if shard.tensor.untyped_storage().nbytes() == 0:  # offloaded
                    places.read_offloaded(shard.tensor, shard.start, target)
                elif staging is not None:
                    staging.copy(shard.view, target)
                else:
                    target.copy_(shard.view)

        dtype = shard.tensor.dtype
        described = SnapshotTensor(
            shard.key,
            shard.place,
            shard.is_main,
            str(dtype).removeprefix("torch."),
            shard.place.volume * dtype.itemsize,
        )
        return described, copy_to


def load_snapshot(engine: MegatronEngine, path: str) -> None:
    """Load the snapshot of this rank, with its random state. Offloaded parts are offloaded again.

    Raises:
        CheckpointError: The snapshot is damaged, or of another layout.
    """
    snapshot = open_snapshot(path)

    # Tensors are filled in place, so all of them must be in memory.
    with engine.in_memory(*StatePart):
        shards = trained_shards(engine)
        if [(shard.key, shard.place) for shard in shards] != [each[:2] for each in snapshot.index[:-1]]:
            raise CheckpointError(f"the snapshot of step {snapshot.step} is of a rank with another layout")
        for number, shard in enumerate(shards):
            shard.view.copy_(snapshot.tensor(number, shard.tensor.dtype))

        record = _record(snapshot)
        engine.optimizer.set_counts(**record["counts"])
        set_random_state(record["random"])


def wanted_tensors(engine: MegatronEngine) -> list[WantedTensor]:
    """Return what a snapshot of this rank restores, to find it in snapshots of another layout."""
    return [(shard.key, shard.shape, shard.place, shard.is_padded) for shard in trained_shards(engine)]


def load_resharded(engine: MegatronEngine, sources: Mapping[str, Sequence[int]]) -> None:
    """Load the state from snapshots of another layout. Offloaded parts are offloaded again.

    Random number generators keep their state, as after a checkpoint of another layout.

    Args:
        sources: The numbers of the tensors that this rank needs (SnapshotSlices.sources), by path.

    Raises:
        CheckpointError: A snapshot is damaged.
    """
    snapshots = {path: open_snapshot(path) for path in sources}
    stored: dict[str, list[tuple[SnapshotFile, int]]] = defaultdict(list)
    for path, numbers in sources.items():
        for number in numbers:
            stored[snapshots[path].index[number].key].append((snapshots[path], number))

    with engine.in_memory(*StatePart):
        for shard in trained_shards(engine):
            _fill(shard, stored[shard.key])

        # All ranks have made the same number of updates.
        engine.optimizer.set_counts(**_record(next(iter(snapshots.values())))["counts"])


def _fill(shard: Shard, stored: Sequence[tuple[SnapshotFile, int]]) -> None:
    """Fill a shard from tensors of snapshots that have parts of it."""
    view = shard.view
    num_filled = 0
    if shard.is_padded:
        view.zero_()  # rows that are not stored
    for snapshot, number in stored:
        place = snapshot.index[number].place
        common = place.intersect(shard.place)
        if common is not None:
            elements = snapshot.tensor(number, shard.tensor.dtype)
            from_place = common.relative_to(place.starts).index
            view[common.relative_to(shard.place.starts).index].copy_(elements[from_place])
            num_filled += common.volume
    assert num_filled == shard.place.volume or shard.is_padded, f"{shard.key} {shard.place} is not filled"


def _record(snapshot: SnapshotFile) -> dict[str, Any]:
    # The record consists of tensors, numbers and containers, so no pickled code has to run.
    return torch.load(io.BytesIO(snapshot.record()), weights_only=True)
