"""Memory that a trainer fills and the engines of its node read in place: a memfd on the CPU, an IPC handle of CUDA on a GPU.

A memfd has no name in any file system: when its process ends, however it ends, the memory is gone, and the size of /dev/shm
does not limit it.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.weights.bucket import SegmentHandle
from megarl.weights.receipt import WeightTransferError

_NAME = "megarl-segment-"
ONE_NODE = "trainer and engine must run on one node, in one container and as one user; else set resharding.transport=broadcast"


class Segment(ABC):
    """Flat memory of `nbytes`. `handle` is what others open it with while this process lives and `close` was not called."""

    handle: SegmentHandle
    _bytes: torch.Tensor | None

    @staticmethod
    def create(nbytes: int, device: torch.device) -> Segment:
        return _CudaSegment(nbytes, device) if device.type == "cuda" else MemorySegment(nbytes)

    def tensor(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements, flat; writing to it writes to the segment."""
        assert self._bytes is not None, "the segment is closed"
        return self._bytes[: numel * dtype.itemsize].view(dtype)

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back, also where readers still have it mapped: they read zeros. Tensors made of it are void."""


class MemorySegment(Segment):
    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create(_NAME + uuid.uuid4().hex)
        os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, nbytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.handle = SegmentHandle("memfd", f"/proc/{os.getpid()}/fd/{self._file}", nbytes)

    def empty(self) -> None:
        """Gives the memory back; it is made anew where it is written."""
        self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes = None
            self.empty()
            os.close(self._file)


class _CudaSegment(Segment):
    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = SegmentHandle("cuda", _encode_cuda(self._bytes), nbytes)

    def close(self) -> None:
        self._bytes = None


class SegmentReader:
    """Opens segments of other processes and keeps them mapped: a trainer uses the same few again and again."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[int, torch.Tensor]] = {}  # address -> (inode, or 0; all bytes)

    def open(self, handle: SegmentHandle, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The first `numel` elements, flat, to be read only. Raises WeightTransferError where the segment or its process is gone."""
        inode = _inode(handle) if handle.kind == "memfd" else 0
        if handle.address not in self._opened or self._opened[handle.address][0] != inode:
            self._opened.pop(handle.address, None)
            self._opened[handle.address] = (inode, map_segment(handle) if handle.kind == "memfd" else _decode_cuda(handle.address))
        nbytes = numel * dtype.itemsize
        if nbytes > handle.nbytes:
            raise WeightTransferError(f"{handle}: {numel} elements of {dtype} were announced, it holds {handle.nbytes} bytes")
        return self._opened[handle.address][1][:nbytes].view(dtype)

    def forget_devices(self) -> None:
        """Of GPU memory: its owner cannot give it back while it is open here."""
        self._opened = {address: opened for address, opened in self._opened.items() if opened[0]}

    def close(self) -> None:
        self._opened = {}


def _inode(handle: SegmentHandle) -> int:
    """A number that tells a segment from a later one in the same place."""
    try:
        is_ours = os.readlink(handle.address).startswith(f"/memfd:{_NAME}")
        status = os.stat(handle.address)
    except OSError as error:
        raise WeightTransferError(
            f"{handle.address}: the trainer's segment is gone, its process has ended ({error}); {ONE_NODE}"
        ) from error
    if not is_ours or status.st_size != handle.nbytes:
        raise WeightTransferError(f"{handle.address}: is not the trainer's segment of {handle.nbytes} bytes; {ONE_NODE}")
    return status.st_ino


def map_segment(handle: SegmentHandle, writable: bool = False) -> torch.Tensor:
    """All bytes of another process's memfd. Raises WeightTransferError where it is gone."""
    _inode(handle)
    try:
        with Path(handle.address).open("r+b" if writable else "rb") as file:
            mapped = mmap.mmap(file.fileno(), handle.nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    except OSError as error:
        raise WeightTransferError(f"{handle.address}: cannot open the trainer's segment ({error}); {ONE_NODE}") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _encode_cuda(tensor: torch.Tensor) -> str:
    """Numbers and bytes as text: what torch would pickle is not opened by anyone here."""
    fields: tuple[Any, ...] = reduce_tensor(tensor)[1]
    numbers = [field.hex() if isinstance(field, bytes) else field for field in fields[7:]]
    return json.dumps({"gpu": str(torch.cuda.get_device_properties(tensor.device).uuid), "offset": fields[3], "fields": numbers})


def _decode_cuda(address: str) -> torch.Tensor:
    encoded = json.loads(address)
    visible = range(torch.cuda.device_count())
    device = next((index for index in visible if str(torch.cuda.get_device_properties(index).uuid) == encoded["gpu"]), None)
    if device is None:
        raise WeightTransferError(f"the trainer's GPU {encoded['gpu']} is not visible to this engine: {ONE_NODE}")
    handle, size, offset, requires_grad, counter, counter_offset, event, event_sync = encoded["fields"]
    return rebuild_cuda_tensor(
        torch.Tensor,
        (size,),
        (1,),
        encoded["offset"],
        torch.UntypedStorage,
        torch.uint8,
        device,
        bytes.fromhex(handle),
        size,
        offset,
        requires_grad,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        event_sync,
    )
