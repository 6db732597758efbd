"""IPC buffers: memory of one device that a trainer rank fills and the engine rank on the same device empties,
a few buffers in turns.

On a CPU it is a memfd: it has no name in any file system, so that it is gone when its process ends, however
it ends, and the size of /dev/shm does not limit it. On a GPU it is an IPC handle of CUDA, opened by a process
that sees the device because it works on it. The memory exists from the first round of a transfer until the
trainer frees it, which it does before others need the device.

A writer and a reader tell each other about each round by a byte through a pipe, which wakes who waits, orders
memory as a lock does, and breaks when its process is gone.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import uuid
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from megarl.weights.tensors import WeightTransferError

_NAME = "megarl-ipc-"
_READ_BYTES = 4096
# among what torch sends of a CUDA tensor: the name of the counter of its readers; the next is its place there
_COUNTER = 11
_NO_COUNTER = b"/megarl-no-counter"
_HINT = (
    "trainer and engine must run on one node, in one container and as one user; else set "
    "resharding.transport=folder"
)


class IPCAddress(NamedTuple):
    """Where an engine rank finds the IPC buffers of the trainer rank on its device.

    Attributes:
        device: The device that holds the memory, by its name in the plan.
        is_cuda: Whether the memory is reached by CUDA IPC; otherwise it is a memory file.
        handle: Path under /proc of a file that says where the memory of the current transfer is.
        nbytes: Size of all buffers together.
        num_buffers: Number of buffers.
        reader_pipe: Path under /proc of the pipe that tells the reader.
        writer_pipe: Path under /proc of the pipe that tells the writer.
    """

    device: str
    is_cuda: bool
    handle: str
    nbytes: int
    num_buffers: int
    reader_pipe: str
    writer_pipe: str


class IPCWriter:
    """The trainer's side: `num_buffers` buffers of `buffer_bytes` each.

    Their memory is allocated when a transfer first uses it and stays until `empty`. It may be at another
    place in the next transfer.
    """

    def __init__(self, buffer_bytes: int, num_buffers: int, device: torch.device, device_name: str) -> None:
        self._device = device
        self._num_buffers = num_buffers
        self._memory: _HostMemory | _CudaMemory | None = None
        self._handle = os.memfd_create(_NAME + uuid.uuid4().hex)

        (to_reader, self._told), (heard, from_reader) = os.pipe(), os.pipe()

        # The reader opens them again, so that the pipes break when it dies.
        for pipe_end in (to_reader, from_reader):
            os.close(pipe_end)
        self._heard = _Ear(heard)

        # The reader opens the memory and the pipes by their paths under /proc.
        handle, *pipes = [f"/proc/{os.getpid()}/fd/{file}" for file in (self._handle, self._told, heard)]
        self.address = IPCAddress(
            device_name, device.type == "cuda", handle, buffer_bytes * num_buffers, num_buffers, *pipes
        )

    @property
    def nbytes(self) -> int:
        return self.address.nbytes

    @property
    def resident_bytes(self) -> int:
        """The memory that is allocated now."""
        return 0 if self._memory is None else self.nbytes

    def buffer(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._allocate()
        return self._memory.bytes.chunk(self._num_buffers)[number % self._num_buffers].view(dtype)

    def _allocate(self) -> _HostMemory | _CudaMemory:
        """Allocate the memory and write its handle where the reader looks when it is told of the first
        round."""
        memory = _CudaMemory(self.nbytes, self._device) if self.address.is_cuda else _HostMemory(self.nbytes)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, memory.handle.encode(), 0)
        return memory

    def is_free(self, number: int, patience_s: float) -> bool:
        """Whether the reader is done with the earlier content of the buffer. Raises WeightTransferError if it
        is gone."""
        return self._heard.has_heard(number + 1 - self._num_buffers, patience_s)

    def has_written(self) -> None:
        if self.address.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # the reader does not share our stream
        _tell(self._told)

    def is_read(self, num_rounds: int, patience_s: float) -> bool:
        """Whether the reader is done with all rounds of the transfer; then the next may begin."""
        if not self._heard.has_heard(num_rounds, patience_s):
            return False
        self._heard.forget(num_rounds)
        return True

    def empty(self) -> None:
        """Free the memory between two transfers. The next transfer allocates it again."""
        if self._memory is not None:
            self._memory.free()
            self._memory = None

    def close(self) -> None:
        """Free the memory for good, also where it is open elsewhere. A live reader no longer looks at it."""
        self.empty()
        self._heard.close()
        os.close(self._told)
        os.close(self._handle)


class IPCReader:
    """The engine's side. It keeps the trainer's memory open during a transfer only, so that the trainer can
    free it afterwards.

    Raises WeightTransferError where the trainer is gone, or has its memory on another device than
    `device_name`.
    """

    def __init__(self, address: IPCAddress, device: torch.device, device_name: str) -> None:
        if address.device != device_name:
            raise WeightTransferError(
                f"the weights lie on device {address.device}, which an engine rank on {device_name} cannot "
                f"see; they must come "
                "from the trainer rank on its own device"
            )

        self._address = address
        self._device = device
        self._bytes: torch.Tensor | None = None

        try:
            # A path under /proc leads to some other file if the two processes are in different containers.
            if not _is_memory_file(address.handle):
                raise WeightTransferError(
                    f"{address.handle} is not the trainer's memory of {address.nbytes} bytes; {_HINT}"
                )
            self._heard = _Ear(os.open(address.reader_pipe, os.O_RDONLY | os.O_NONBLOCK))
            self._told = os.open(address.writer_pipe, os.O_WRONLY)
        except OSError as error:
            raise WeightTransferError(
                f"the trainer's IPC buffers for weights are gone ({error}); {_HINT}"
            ) from error

    def buffer(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer of a round that is written."""
        if self._bytes is None:
            self._bytes = self._open()
        return self._bytes.chunk(self._address.num_buffers)[number % self._address.num_buffers].view(dtype)

    def _open(self) -> torch.Tensor:
        try:
            handle = Path(self._address.handle).read_text()
            return (
                _decode_cuda(handle, self._device)
                if self._address.is_cuda
                else _map(handle, self._address.nbytes)
            )
        except OSError as error:
            raise WeightTransferError(
                f"the trainer's IPC buffers for weights are gone ({error}); {_HINT}"
            ) from error

    def is_written(self, number: int, patience_s: float) -> bool:
        """Raises WeightTransferError where the trainer is gone."""
        return self._heard.has_heard(number + 1, patience_s)

    def has_read(self) -> None:
        if self._address.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # the writer overwrites it next
        _tell(self._told)

    def end(self, num_rounds: int) -> None:
        """After all rounds of a transfer. The trainer may free its memory when the engine has said that it
        has its weights."""
        self._heard.forget(num_rounds)
        self._bytes = None

    def close(self) -> None:
        self._heard.close()
        os.close(self._told)
        self._bytes = None


class _HostMemory:
    """Shared memory without a name in any file system. `handle`: its path under /proc."""

    def __init__(self, nbytes: int) -> None:
        self._file = os.memfd_create(_NAME + uuid.uuid4().hex)
        os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, nbytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.handle = f"/proc/{os.getpid()}/fd/{self._file}"

    def free(self) -> None:
        self._map.madvise(mmap.MADV_REMOVE)  # also where a reader that was lost still has it mapped
        self.bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)


class _CudaMemory:
    """Device memory that another process opens by CUDA IPC. `handle`: the encoded IPC handle."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = _encode_cuda(self.bytes)

    def free(self) -> None:
        """Return the memory to torch's allocator, from which the offloading of the trainer's state returns it
        to the device."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


class _Ear:
    """The reading end of a pipe, through which the other side says that it is done with one more round."""

    def __init__(self, file: int) -> None:
        os.set_blocking(file, False)
        self._file = file
        self._count = 0
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)

    def has_heard(self, count: int, patience_s: float) -> bool:
        """Whether it was said `count` times; False when `patience_s` have passed without a word."""
        while self._count < count:
            if not self._poll.poll(patience_s * 1000):
                return False
            # A read without bytes means that the other side has closed its end of the pipe.
            if not (words := os.read(self._file, _READ_BYTES)):
                raise WeightTransferError(_GONE)
            self._count += len(words)
        return True

    def forget(self, count: int) -> None:
        self._count -= count

    def close(self) -> None:
        os.close(self._file)


_GONE = "the process on the other side of the IPC buffers for weights is gone"


def _tell(file: int) -> None:
    try:
        os.write(file, b"\0")
    except BrokenPipeError as error:
        raise WeightTransferError(_GONE) from error


def _is_memory_file(path: str) -> bool:
    return os.readlink(path).startswith(f"/memfd:{_NAME}")


def _map(path: str, nbytes: int) -> torch.Tensor:
    if not _is_memory_file(path) or os.stat(path).st_size != nbytes:
        raise WeightTransferError(f"{path} is not the trainer's memory of {nbytes} bytes; {_HINT}")
    with Path(path).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ)

    # The mapping is read-only on purpose, about which torch would warn.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _encode_cuda(tensor: torch.Tensor) -> str:
    """Numbers and bytes as text: what torch would pickle is not opened by anyone here."""
    fields: list[Any] = list(reduce_tensor(tensor)[1])

    # torch would keep the memory until its reader counts down, which one that is killed never does. So nobody
    # counts: we do it here, and the reader is given a counter that is not there, which torch passes over in
    # silence. Who is there say the pipes.
    torch.UntypedStorage._release_ipc_counter_cuda(fields[_COUNTER], fields[_COUNTER + 1])
    fields[_COUNTER] = _NO_COUNTER
    numbers = [field.hex() if isinstance(field, bytes) else field for field in fields[7:]]

    return json.dumps(
        {
            "gpu": str(torch.cuda.get_device_properties(tensor.device).uuid),
            "offset": fields[3],
            "fields": numbers,
        }
    )


def _decode_cuda(memory: str, device: torch.device) -> torch.Tensor:
    encoded = json.loads(memory)
    own = str(torch.cuda.get_device_properties(device).uuid)

    if own != encoded["gpu"]:
        raise WeightTransferError(
            f"the weights lie on the GPU {encoded['gpu']}, this engine rank works on {own}: the placement "
            f"is not the plan's"
        )

    handle, size, offset, requires_grad, counter, counter_offset, event, event_sync = encoded["fields"]
    index = torch.cuda.current_device() if device.index is None else device.index  # torch wants a number here
    return rebuild_cuda_tensor(
        torch.Tensor,
        (size,),
        (1,),
        encoded["offset"],
        torch.UntypedStorage,
        torch.uint8,
        index,
        bytes.fromhex(handle),
        size,
        offset,
        requires_grad,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        event_sync,
    )
