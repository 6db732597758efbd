"""Moves a model's state out of the way and back, bit for bit: gradients, optimizer state, parameters.

A tensor's memory is its storage, and views of it are everywhere: Megatron's buffers, their buckets, the
parameters, the optimizer's shards of them. So storages are emptied and filled in place, and every view is
right again afterwards. On CUDA the bytes wait in pinned host memory. On the CPU they wait in a temporary file
(in TMPDIR, or /var/tmp) that has no name, so that a process's memory really gets smaller and a killed process
leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, UntypedStorage

from megarl.engine import platform

_ALIGNMENT = 512  # bytes: a copy to or from a device goes fastest there


class StatePart(str, Enum):
    """What can be moved by itself. `optimizer`: moments and, for bfloat16, float32 masters. `gradients` are
    zero when they are back."""

    gradients = "gradients"
    optimizer = "optimizer"
    parameters = "parameters"


class OffloadedError(RuntimeError):
    """The engine was asked for what it cannot do without the parts that are away."""


class _HostBuffer(Protocol):
    """Where bytes wait, in the order in which they are given."""

    def put(self, storages: Sequence[UntypedStorage]) -> None: ...

    def take(self, storages: Sequence[UntypedStorage]) -> None: ...

    def read(self, number: int, start: int, target: Tensor) -> None:
        """Bytes of the storage that was put as `number`, from `start` on, into `target` (bytes,) uint8 in
        host memory; they stay."""


class _File:
    """Of the file system, without a name. Its space is given back when the bytes are."""

    def __init__(self) -> None:
        self._file: io.FileIO | None = None
        self._starts: list[int] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Raises OSError that names the folder where the bytes do not fit."""
        folder = _disk_folder()
        try:
            # Open until `take`.
            file = cast(io.FileIO, tempfile.TemporaryFile(buffering=0, dir=folder))  # noqa: SIM115
            for storage in storages:
                _all_of(storage, file.write)
        except OSError as error:
            size_mb = sum(storage.nbytes() for storage in storages) / 1e6
            raise OSError(
                error.errno,
                f"cannot keep {size_mb:,.0f} MB of offloaded state in {folder}: {error.strerror}; set "
                f"TMPDIR to a folder with room",
            ) from error

        # Set only after everything is written, so that a failure leaves this object as it was.
        self._file = file
        self._starts = list(accumulate((storage.nbytes() for storage in storages), initial=0))

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        assert self._file is not None

        # Closing the nameless file returns its space to the file system.
        with self._file as file:
            file.seek(0)
            for storage in storages:
                _all_of(storage, file.readinto)
        self._file = None

    def read(self, number: int, start: int, target: Tensor) -> None:
        assert self._file is not None
        self._file.seek(self._starts[number] + start)
        _all_of(target.untyped_storage(), self._file.readinto)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _disk_folder() -> str:
    """/tmp is memory on many systems, /var/tmp is not."""
    on_disk = "/var/tmp"
    return tempfile.gettempdir() if os.environ.get("TMPDIR") or not os.access(on_disk, os.W_OK) else on_disk


def _all_of(storage: UntypedStorage, move: Callable[[memoryview], int | None]) -> None:
    """One call moves at most 2 GiB on Linux."""
    # By its address: a storage that was shown as a numpy array cannot be resized any more.
    view = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
    while view:
        moved = move(view)
        if not moved:
            raise OSError(f"the temporary file of an offloaded model ended {len(view)} bytes early")
        view = view[moved:]


class PinnedMemory:
    """One buffer, kept from one time to the next: pinning takes longer than copying. It is pinned as it is,
    since torch's allocator of pinned memory would round it up to a power of two."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.places: list[Tensor] = []  # in the buffer, by storage

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        if [place.numel() for place in self.places] != [storage.nbytes() for storage in storages]:
            self._make_room([storage.nbytes() for storage in storages])
        self._copy((place, _bytes_of(storage)) for place, storage in zip(self.places, storages, strict=True))

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        self._copy((_bytes_of(storage), place) for place, storage in zip(self.places, storages, strict=True))

    def read(self, number: int, start: int, target: Tensor) -> None:
        target.copy_(self.places[number][start : start + target.numel()])

    def _make_room(self, sizes: Sequence[int]) -> None:
        # The old buffer must be unpinned before its memory is freed.
        if self.places:
            platform.current().unpin(self.buffer)
        starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        self.buffer = torch.empty(starts[-1], dtype=torch.uint8)
        platform.current().pin(self.buffer)
        self.places = [self.buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    @staticmethod
    def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

        # The copies are asynchronous, and the caller releases or uses the memory next.
        torch.cuda.synchronize()


def new_host_buffer() -> _HostBuffer:
    return PinnedMemory() if platform.current().is_cuda else _File()


class _Moved(NamedTuple):
    storage: UntypedStorage
    nbytes: int


class MovableState:
    """One part of a model's state. `find` gives its tensors as they are at the moment; what shares a storage
    is moved once.

    `kept` False: the contents are dropped, and zero when the memory is back.
    """

    def __init__(self, find: Callable[[], Iterable[Tensor]], kept: bool = True) -> None:
        self._find = find
        self._kept = kept
        self._host_buffer = new_host_buffer()
        self._offloaded: list[_Moved] | None = None

    @property
    def is_offloaded(self) -> bool:
        return self._offloaded is not None

    def offload(self) -> int:
        """Bytes given back; 0 where they are away already. Raises OSError where there is no room for them,
        and moves nothing then."""
        if self._offloaded is not None:
            return 0
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._find()}
        moved = [_Moved(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]

        # All bytes are stored before any memory is released: where that fails nothing has moved.
        if self._kept:
            self._host_buffer.put([each.storage for each in moved])
        for each in moved:
            each.storage.resize_(0)
        self._offloaded = moved

        # Other processes can use the memory only after the allocator has returned it.
        platform.current().return_freed_memory()

        return sum(each.nbytes for each in moved)

    def restore(self) -> int:
        """Bytes taken again; 0 where nothing is away."""
        if self._offloaded is None:
            return 0

        # The storages grow in place, which makes every view of them valid again.
        for each in self._offloaded:
            each.storage.resize_(each.nbytes)
            if not self._kept:
                _bytes_of(each.storage).zero_()

        if self._kept:
            self._host_buffer.take([each.storage for each in self._offloaded])
        nbytes = sum(each.nbytes for each in self._offloaded)
        self._offloaded = None

        return nbytes

    def read(self, tensor: Tensor, start: int, count: int) -> Tensor | None:
        """Elements start..start + count of a contiguous tensor that is away, in host memory of their own;
        None where it is not."""
        identity = tensor.untyped_storage()._cdata  # its address is gone with its memory
        for number, moved in enumerate(self._offloaded or ()):
            if moved.storage._cdata == identity:
                assert self._kept
                copy = torch.empty(count * tensor.itemsize, dtype=torch.uint8)
                self._host_buffer.read(number, (int(tensor.storage_offset()) + start) * tensor.itemsize, copy)
                return copy.view(tensor.dtype)

        return None


class OffloadableState:
    """The parts of one model that can be moved: all three where it trains, its parameters where it is
    frozen."""

    def __init__(self, parts: Mapping[StatePart, MovableState]) -> None:
        self._parts = dict(parts)

    @property
    def offloaded(self) -> frozenset[StatePart]:
        return frozenset(part for part, state in self._parts.items() if state.is_offloaded)

    def offload(self, parts: Iterable[StatePart]) -> int:
        """Bytes given back. What is away stays away; a part that the model does not have is nothing."""
        return sum(self._parts[part].offload() for part in parts if part in self._parts)

    def restore(self, parts: Iterable[StatePart]) -> int:
        """Bytes taken again."""
        return sum(self._parts[part].restore() for part in parts if part in self._parts)

    def require(self, action: str, *parts: StatePart) -> None:
        """Raises OffloadedError that says what is away."""
        missing = [part.value for part in parts if part in self.offloaded]
        if missing:
            raise OffloadedError(
                f"the engine cannot {action}: {' and '.join(missing)} offloaded; restore what was moved "
                f"away first"
            )

    def host_copy(self, tensor: Tensor, start: int, count: int) -> Tensor:
        """Elements start..start + count of a contiguous tensor, in its memory's order: (count,) in host
        memory of their own.

        Also of a tensor that is away, which stays away.
        """
        for state in self._parts.values():
            copy = state.read(tensor, start, count)
            if copy is not None:
                return copy
        return tensor.detach().view(-1)[start : start + count].to("cpu", copy=True)
