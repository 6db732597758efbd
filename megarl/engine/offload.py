"""Offload a model's gradients, optimizer state and parameters, and restore them bitwise identical.

The memory of a tensor is its storage, which many views share: Megatron's buffers, their buckets, the
parameters, and the optimizer's shards of them. Storages are therefore emptied and refilled in place, after
which every view is valid again. On CUDA the bytes are kept in pinned host memory. On a CPU they are kept in
an unnamed temporary file (in TMPDIR, or /var/tmp), so that the memory of the process really shrinks and a
killed process leaves no file.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from io import BufferedIOBase, BufferedRandom
from itertools import accumulate

import torch
from torch import Tensor, UntypedStorage

from megarl.engine import platform

_ALIGNMENT = 512  # bytes: the fastest alignment for copies to or from a device
_ON_DISK = "/var/tmp"


class StatePart(str, Enum):
    """A part of the state that can be offloaded separately.

    `optimizer` contains moments and, for bfloat16, float32 masters. `gradients` are zero after they are
    restored.
    """

    gradients = "gradients"
    optimizer = "optimizer"
    parameters = "parameters"


class OffloadedError(RuntimeError):
    """The engine was asked to do something that needs offloaded state."""


class _File:
    """A host buffer in an unnamed file, whose space is freed when the bytes are taken.

    Storages are put and taken in the same order.
    """

    def __init__(self) -> None:
        self._file: BufferedRandom | None = None
        self._starts: list[int] = []

    def put(self, storages: Sequence[UntypedStorage]) -> None:
        """Store the bytes.

        Raises:
            OSError: They do not fit. The message names the folder.
        """
        # /tmp is in memory on many systems, /var/tmp is not.
        is_chosen = os.environ.get("TMPDIR") or not os.access(_ON_DISK, os.W_OK)
        folder = tempfile.gettempdir() if is_chosen else _ON_DISK
        try:
            # The file stays open until `take`.
            file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
            for storage in storages:
                file.write(_host_bytes(storage.data_ptr(), storage.nbytes()))
            file.flush()
        except OSError as error:
            size_mb = sum(storage.nbytes() for storage in storages) / 1e6
            raise OSError(
                error.errno,
                f"cannot keep {size_mb:,.0f} MB of offloaded state in {folder}: {error.strerror}; set "
                f"TMPDIR to a folder with free space",
            ) from error

        # Set only after everything is written, so that a failure leaves this object unchanged.
        self._file = file
        self._starts = list(accumulate((storage.nbytes() for storage in storages), initial=0))

    def take(self, storages: Sequence[UntypedStorage]) -> None:
        assert self._file is not None

        # Closing the unnamed file returns its space to the file system.
        with self._file as file:
            file.seek(0)
            for storage in storages:
                _fill(file, storage.data_ptr(), storage.nbytes())
        self._file = None

    def read(self, number: int, start: int, target: Tensor) -> None:
        """Copy bytes of the storage number `number`, starting at `start`, into `target`. The originals stay.

        Args:
            number: The number of the storage in `put`.
            start: The first byte.
            target: (bytes,) uint8 in host memory.
        """
        assert self._file is not None
        # Opened again, since a snapshot reads in a thread of its own, from another position.
        with open(f"/proc/self/fd/{self._file.fileno()}", "rb") as file:
            file.seek(self._starts[number] + start)
            _fill(file, target.data_ptr(), target.numel())


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(address: int, nbytes: int) -> memoryview:
    """Return host memory by its address: a storage exposed as a numpy array can no longer be resized."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _fill(file: BufferedIOBase, address: int, nbytes: int) -> None:
    missing = nbytes - file.readinto(_host_bytes(address, nbytes))
    if missing:
        raise OSError(f"the temporary file of an offloaded model is {missing} bytes too short")


class PinnedMemory:
    """A host buffer with the methods of `_File`: pinned, and kept, because pinning takes longer than copying.

    The buffer is pinned at its exact size; torch's pinned allocator would round it up to a power of two.
    """

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.places: list[Tensor] = []  # the part of the buffer of each storage

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


def new_host_buffer() -> _File | PinnedMemory:
    return PinnedMemory() if platform.current().is_cuda else _File()


class MovableState:
    """One part of a model's state.

    Args:
        find: Returns its current tensors. Tensors that share a storage are moved once.
        kept: Whether the contents are kept. Otherwise they are dropped, and the restored memory is zero.
    """

    def __init__(self, find: Callable[[], Iterable[Tensor]], kept: bool = True) -> None:
        self._find = find
        self._kept = kept
        self._host_buffer = new_host_buffer()
        # The storages with their sizes; None: in memory.
        self.offloaded: list[tuple[UntypedStorage, int]] | None = None

    def offload(self) -> int:
        """Offload the state.

        Returns:
            The number of freed bytes; 0 if the state is already offloaded.

        Raises:
            OSError: There is not enough space. Nothing has been moved.
        """
        if self.offloaded is not None:
            return 0
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._find()}
        moved = [(storage, storage.nbytes()) for storage in storages.values() if storage.nbytes()]

        # All bytes are stored before any memory is released: if that fails, nothing has moved.
        if self._kept:
            self._host_buffer.put([storage for storage, _ in moved])
        for storage, _ in moved:
            storage.resize_(0)
        self.offloaded = moved

        # Other processes can use the memory only after the allocator has returned it.
        platform.current().return_freed_memory()

        return sum(nbytes for _, nbytes in moved)

    def restore(self) -> int:
        """Restore the state. Returns the number of allocated bytes; 0 if nothing is offloaded."""
        if self.offloaded is None:
            return 0

        # The storages grow in place, which makes every view of them valid again.
        for storage, size in self.offloaded:
            storage.resize_(size)
            if not self._kept:
                _bytes_of(storage).zero_()

        if self._kept:
            self._host_buffer.take([storage for storage, _ in self.offloaded])
        nbytes = sum(size for _, size in self.offloaded)
        self.offloaded = None

        return nbytes

    def read(self, tensor: Tensor, start: int, target: Tensor) -> bool:
        """Copy elements of an offloaded contiguous tensor, which stays offloaded.

        Args:
            start: The first element.
            target: A contiguous host tensor, which is filled.

        Returns:
            Whether the tensor is offloaded.
        """
        identity = tensor.untyped_storage()._cdata  # the address is lost with the memory
        for number, (storage, _) in enumerate(self.offloaded or ()):
            if storage._cdata == identity:
                assert self._kept
                first = (int(tensor.storage_offset()) + start) * tensor.itemsize
                self._host_buffer.read(number, first, target.view(-1).view(torch.uint8))
                return True

        return False


class OffloadableState:
    """The offloadable parts of one model: all three if it trains, its parameters if it is frozen."""

    def __init__(self, parts: Mapping[StatePart, MovableState]) -> None:
        self._parts = dict(parts)

    @property
    def offloaded(self) -> frozenset[StatePart]:
        return frozenset(part for part, state in self._parts.items() if state.offloaded is not None)

    def offload(self, parts: Iterable[StatePart]) -> int:
        """Offload parts and return the number of freed bytes. Skips offloaded and absent parts."""
        return sum(self._parts[part].offload() for part in parts if part in self._parts)

    def restore(self, parts: Iterable[StatePart]) -> int:
        """Restore parts and return the number of allocated bytes."""
        return sum(self._parts[part].restore() for part in parts if part in self._parts)

    def require(self, action: str, *parts: StatePart) -> None:
        """Check that parts are in memory.

        Raises:
            OffloadedError: Some are offloaded. The message names them.
        """
        missing = [part.value for part in parts if part in self.offloaded]
        if missing:
            raise OffloadedError(
                f"the engine cannot {action}: {' and '.join(missing)} offloaded; restore the offloaded state "
                f"first"
            )

    def host_copy(self, tensor: Tensor, start: int, count: int) -> Tensor:
        """Return a host copy (count,) of elements start..start + count of a contiguous tensor.

        The tensor may be offloaded, and then stays so.
        """
        if tensor.untyped_storage().nbytes() == 0 and count:
            copy = torch.empty(count, dtype=tensor.dtype)
            self.read_offloaded(tensor, start, copy)
            return copy
        return tensor.detach().view(-1)[start : start + count].to("cpu", copy=True)

    def read_offloaded(self, tensor: Tensor, start: int, target: Tensor) -> None:
        """Copy elements of an offloaded contiguous tensor from the host into a contiguous host tensor.

        Args:
            tensor: The tensor, which stays offloaded.
            start: The first element.
            target: Is filled with as many elements as it has.
        """
        was_read = any(state.read(tensor, start, target) for state in self._parts.values())
        assert was_read, "a tensor without memory is offloaded"
