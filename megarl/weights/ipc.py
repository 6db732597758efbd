"""IPC buffers: device memory that a trainer rank fills and the engine rank on the same device reads.

On a CPU the memory is a memfd: it has no name in any file system, disappears with its process, and is not
limited by the size of /dev/shm. On a GPU it is a CUDA IPC handle, which is opened by a process that sees the
device because it works on it. The memory exists from the first round of a transfer until the trainer frees
it, which happens before other models need the device.

Writer and reader signal each round with a byte through a pipe. The pipe wakes the waiting process, orders
memory accesses like a lock, and breaks when the process at its other end is gone.
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
# Index of the name of the reader counter in what torch sends for a CUDA tensor; its offset follows.
_COUNTER = 11
_NO_COUNTER = b"/megarl-no-counter"
_HINT = (
    "trainer and engine must run on one node, in one container and as one user; otherwise set "
    "resharding.transport=folder"
)


class IPCAddress(NamedTuple):
    """The address of the IPC buffers that an engine rank shares with the trainer rank on its device.

    Attributes:
        device: The device that holds the memory, by its name in the plan.
        is_cuda: Whether the memory is reached by CUDA IPC; otherwise it is a memory file.
        handle: Path under /proc of a file that contains the location of the current transfer's memory.
        nbytes: Size of all buffers together.
        num_buffers: Number of buffers.
        reader_pipe: Path under /proc of the pipe that signals the reader.
        writer_pipe: Path under /proc of the pipe that signals the writer.
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

    The memory is allocated on first use in a transfer and stays until `empty`. It may have another address in
    the next transfer.
    """

    def __init__(self, buffer_bytes: int, num_buffers: int, device: torch.device, device_name: str) -> None:
        self._device = device
        self._num_buffers = num_buffers
        self._memory: _HostMemory | _CudaMemory | None = None
        self._handle = os.memfd_create(_NAME + uuid.uuid4().hex)

        (to_reader, self._told), (heard, from_reader) = os.pipe(), os.pipe()

        # Close the other ends here: the reader reopens them, so that the pipes break when it dies.
        for pipe_end in (to_reader, from_reader):
            os.close(pipe_end)
        self._heard = _Ear(heard)

        # The reader opens the memory and the pipes by their paths under /proc.
        handle, *pipes = [f"/proc/{os.getpid()}/fd/{file}" for file in (self._handle, self._told, heard)]
        self.address = IPCAddress(
            device_name, device.type == "cuda", handle, buffer_bytes * num_buffers, num_buffers, *pipes
        )

    def buffer(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._allocate()
        return self._memory.bytes.chunk(self._num_buffers)[number % self._num_buffers].view(dtype)

    def _allocate(self) -> _HostMemory | _CudaMemory:
        """Allocate the memory and write its handle to the file that the reader opens in the first round."""
        nbytes = self.address.nbytes
        memory = _CudaMemory(nbytes, self._device) if self.address.is_cuda else _HostMemory(nbytes)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, memory.handle.encode(), 0)
        return memory

    def is_free(self, number: int, patience_s: float) -> bool:
        """Return whether the reader is done with the earlier contents of the buffer.

        Raises:
            WeightTransferError: The reader is gone.
        """
        return self._heard.has_heard(number + 1 - self._num_buffers, patience_s)

    def has_written(self) -> None:
        if self.address.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # the reader uses another stream
        _tell(self._told)

    def is_read(self, num_rounds: int, patience_s: float) -> bool:
        """Return whether the reader is done with all rounds of the transfer, so that the next may begin."""
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
        """Free the memory permanently, even if a reader has it open. A live reader no longer uses it."""
        self.empty()
        self._heard.close()
        os.close(self._told)
        os.close(self._handle)


class IPCReader:
    """The engine's side. It opens the trainer's memory during transfers only.

    Raises:
        WeightTransferError: The trainer is gone, or its memory is not on `device_name`.
    """

    def __init__(self, address: IPCAddress, device: torch.device, device_name: str) -> None:
        if address.device != device_name:
            raise WeightTransferError(
                f"the weights are on device {address.device}, which an engine rank on {device_name} cannot "
                f"access; they must come from the trainer rank on its own device"
            )

        self._address = address
        self._device = device
        self._bytes: torch.Tensor | None = None

        try:
            # If the two processes are in different containers, a path under /proc leads to another file.
            # It stays open, since the trainer's end frees its number for another file.
            self._handle = os.open(address.handle, os.O_RDONLY)
            if not _name_of(self._handle).startswith(_NAME):
                os.close(self._handle)
                raise WeightTransferError(
                    f"{address.handle} is not the trainer's memory of {address.nbytes} bytes; {_HINT}"
                )
            # Without O_NONBLOCK, opening the pipe to read would wait until it has a writer.
            self._heard = _Ear(os.open(address.reader_pipe, os.O_RDONLY | os.O_NONBLOCK))
            self._told = os.open(address.writer_pipe, os.O_WRONLY)
        except OSError as error:
            raise WeightTransferError(
                f"the trainer's IPC buffers for weights are gone ({error}); {_HINT}"
            ) from error

    def buffer(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer of a round that has been written."""
        if self._bytes is None:
            self._bytes = self._open()
        return self._bytes.chunk(self._address.num_buffers)[number % self._address.num_buffers].view(dtype)

    def _open(self) -> torch.Tensor:
        handle = os.pread(self._handle, _READ_BYTES, 0).decode()
        try:
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
        """Return whether a round has been written. Waits for at most `patience_s` seconds.

        Raises:
            WeightTransferError: The trainer is gone.
        """
        return self._heard.has_heard(number + 1, patience_s)

    def has_read(self) -> None:
        if self._address.is_cuda:
            torch.cuda.current_stream(self._device).synchronize()  # the writer overwrites it next
        _tell(self._told)

    def end(self, num_rounds: int) -> None:
        """Finish a transfer after its last round.

        The trainer may free its memory once the engine has reported that it has the weights.
        """
        self._heard.forget(num_rounds)
        self._bytes = None

    def close(self) -> None:
        self._heard.close()
        os.close(self._told)
        os.close(self._handle)
        self._bytes = None


class _HostMemory:
    """Shared memory without a name in any file system. `handle` is its own name and its path under /proc."""

    def __init__(self, nbytes: int) -> None:
        name = _NAME + uuid.uuid4().hex
        self._file = os.memfd_create(name)
        os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, nbytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.handle = f"{name} /proc/{os.getpid()}/fd/{self._file}"

    def free(self) -> None:
        self._map.madvise(mmap.MADV_REMOVE)  # even if a lost reader still maps it
        self.bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self._file)


class _CudaMemory:
    """Device memory that another process opens with CUDA IPC. `handle` is the encoded IPC handle."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.handle = _encode_cuda(self.bytes)

    def free(self) -> None:
        """Return the memory to torch's allocator. Offloading the trainer's state returns it to the device."""
        self.bytes = torch.empty(0, dtype=torch.uint8)


class _Ear:
    """The reading end of a pipe on which the other side signals each round that it has finished."""

    def __init__(self, file: int) -> None:
        os.set_blocking(file, False)
        self._file = file
        self._count = 0
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)

    def has_heard(self, count: int, patience_s: float) -> bool:
        """Return whether `count` signals have arrived; False after `patience_s` seconds without one."""
        while self._count < count:
            if not self._poll.poll(patience_s * 1000):
                return False
            # Reading no bytes means that the other side has closed its end of the pipe.
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


def _name_of(file: int) -> str:
    """Return the name with which a memory file was created, or the path of another file."""
    return os.readlink(f"/proc/self/fd/{file}").removeprefix("/memfd:").removesuffix(" (deleted)")


def _map(handle: str, nbytes: int) -> torch.Tensor:
    name, path = handle.split()
    with Path(path).open("rb") as file:
        # When the trainer has freed its memory, the same path may lead to another file.
        if _name_of(file.fileno()) != name:
            raise WeightTransferError(f"the trainer's IPC buffers for weights are gone; {_HINT}")
        assert os.fstat(file.fileno()).st_size == nbytes
        mapped = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ)

    # The mapping is read-only on purpose; suppress torch's warning about it.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _encode_cuda(tensor: torch.Tensor) -> str:
    """Encode an IPC handle as JSON, so that the reader does not have to unpickle anything."""
    fields: list[Any] = list(reduce_tensor(tensor)[1])

    # torch would keep the memory until its reader decrements the counter, which a killed reader never does.
    # Release the counter here and give the reader the name of a nonexistent one, which torch ignores
    # silently. The pipes detect whether a process is alive.
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
            f"the weights are on GPU {encoded['gpu']}, but this engine rank works on {own}: the placement "
            f"differs from the plan"
        )

    handle, size, offset, requires_grad, counter, counter_offset, event, event_sync = encoded["fields"]
    # torch requires an index here.
    index = torch.cuda.current_device() if device.index is None else device.index
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
