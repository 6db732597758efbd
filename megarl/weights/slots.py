"""Memory of one device that a trainer rank fills and the engine rank on the same device empties, a few slots in turns.

On a CPU it is a memfd: it has no name in any file system, so that it is gone when its process ends, however it ends, and the size of
/dev/shm does not limit it. On a GPU it is an IPC handle of CUDA, which is opened once and by a process that sees the device because
it works on it. Who has written or read tells the other by a byte through a pipe, which wakes who waits, orders memory as a lock does,
and breaks when its process is gone.
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

_NAME = "megarl-slots-"
_READ_BYTES = 4096
_COUNTER = 11  # among what torch sends of a CUDA tensor: the name of the counter of its readers; the next is its place there
_NO_COUNTER = b"/megarl-no-counter"
_REMEDY = "trainer and engine must run on one node, in one container and as one user; else set resharding.transport=folder"


class SlotAddress(NamedTuple):
    """`device`: whose memory it is, by its name in the plan. `memory`: a path under /proc, or an encoded CUDA IPC handle. The inboxes
    are paths under /proc; all of it is there while the process lives that made it."""

    device: str
    is_cuda: bool
    memory: str
    nbytes: int
    num_slots: int
    reader_inbox: str
    writer_inbox: str


class SlotWriter:
    """The trainer's end: `num_slots` slots of `slot_bytes` each. They stay from one transfer to the next."""

    def __init__(self, slot_bytes: int, num_slots: int, device: torch.device, device_name: str) -> None:
        self._num_slots = num_slots
        nbytes = slot_bytes * num_slots
        self._file: int | None = None
        self._map: mmap.mmap | None = None
        if device.type == "cuda":
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
            memory = _encode_cuda(self._bytes)
        else:
            self._file = os.memfd_create(_NAME + uuid.uuid4().hex)
            os.ftruncate(self._file, nbytes)
            self._map = mmap.mmap(self._file, nbytes)
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            memory = f"/proc/{os.getpid()}/fd/{self._file}"
        (to_reader, self._told), (heard, from_reader) = os.pipe(), os.pipe()
        for end in (to_reader, from_reader):  # they are the reader's, who opens them anew: when it dies the pipes break
            os.close(end)
        self._heard = _Ear(heard)
        inboxes = [f"/proc/{os.getpid()}/fd/{end}" for end in (self._told, heard)]
        self.address = SlotAddress(device_name, device.type == "cuda", memory, nbytes, num_slots, *inboxes)

    @property
    def nbytes(self) -> int:
        return self.address.nbytes

    def slot(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.chunk(self._num_slots)[number % self._num_slots].view(dtype)

    def is_free(self, number: int, patience_s: float) -> bool:
        """Whether the reader is done with what was in the slot before. Raises WeightTransferError where it is gone."""
        return self._heard.has_heard(number + 1 - self._num_slots, patience_s)

    def has_written(self) -> None:
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()  # the reader does not share our stream
        _tell(self._told)

    def is_read(self, num_rounds: int, patience_s: float) -> bool:
        """Whether the reader is done with all rounds of the transfer; then the next may begin."""
        if not self._heard.has_heard(num_rounds, patience_s):
            return False
        self._heard.forget(num_rounds)
        return True

    def empty(self) -> None:
        """Between two transfers: gives host memory back until the next, also where the reader has it mapped."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Gives the memory back for good, also where it is open elsewhere. A reader that lives does not look at it any more."""
        self.empty()
        self._heard.close()
        os.close(self._told)
        self._bytes, self._map = torch.empty(0, dtype=torch.uint8), None
        if self._file is not None:
            os.close(self._file)


class SlotReader:
    """The engine's end. Raises WeightTransferError where the trainer is gone, or has its memory on another device than `device_name`."""

    def __init__(self, address: SlotAddress, device: torch.device, device_name: str) -> None:
        if address.device != device_name:
            raise WeightTransferError(
                f"the weights lie on device {address.device}, which an engine rank on {device_name} cannot see; they must come "
                "from the trainer rank on its own device"
            )
        self._num_slots = address.num_slots
        self._bytes = _decode_cuda(address.memory, device) if address.is_cuda else _map(address)
        try:
            self._heard = _Ear(os.open(address.reader_inbox, os.O_RDONLY | os.O_NONBLOCK))
            self._told = os.open(address.writer_inbox, os.O_WRONLY)
        except OSError as error:
            raise WeightTransferError(f"the trainer's slots for weights are gone ({error}); {_REMEDY}") from error

    def slot(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        return self._bytes.chunk(self._num_slots)[number % self._num_slots].view(dtype)

    def is_written(self, number: int, patience_s: float) -> bool:
        """Raises WeightTransferError where the trainer is gone."""
        return self._heard.has_heard(number + 1, patience_s)

    def has_read(self) -> None:
        if self._bytes.is_cuda:
            torch.cuda.current_stream(self._bytes.device).synchronize()  # the writer overwrites it next
        _tell(self._told)

    def end(self, num_rounds: int) -> None:
        """After all rounds of a transfer."""
        self._heard.forget(num_rounds)

    def close(self) -> None:
        self._heard.close()
        os.close(self._told)
        self._bytes = torch.empty(0, dtype=torch.uint8)


class _Ear:
    """The reading end of a pipe, through which the other side says that it is done with one more round."""

    def __init__(self, file: int) -> None:
        os.set_blocking(file, False)
        self._file, self._count = file, 0
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)

    def has_heard(self, count: int, patience_s: float) -> bool:
        """Whether it was said `count` times; False when `patience_s` have passed without a word."""
        while self._count < count:
            if not self._poll.poll(patience_s * 1000):
                return False
            if not (words := os.read(self._file, _READ_BYTES)):
                raise WeightTransferError(_GONE)
            self._count += len(words)
        return True

    def forget(self, count: int) -> None:
        self._count -= count

    def close(self) -> None:
        os.close(self._file)


_GONE = "the process on the other side of the slots for weights is gone"


def _tell(file: int) -> None:
    try:
        os.write(file, b"\0")
    except BrokenPipeError as error:
        raise WeightTransferError(_GONE) from error


def _map(address: SlotAddress) -> torch.Tensor:
    try:
        is_ours = os.readlink(address.memory).startswith(f"/memfd:{_NAME}")
        if not is_ours or os.stat(address.memory).st_size != address.nbytes:
            raise WeightTransferError(f"{address.memory} is not the trainer's memory of {address.nbytes} bytes; {_REMEDY}")
        with Path(address.memory).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), address.nbytes, prot=mmap.PROT_READ)
    except OSError as error:
        raise WeightTransferError(f"{address.memory}: the trainer's slots for weights are gone ({error}); {_REMEDY}") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _encode_cuda(tensor: torch.Tensor) -> str:
    """Numbers and bytes as text: what torch would pickle is not opened by anyone here."""
    fields: list[Any] = list(reduce_tensor(tensor)[1])
    # torch would keep the memory until its reader counts down, which one that is killed never does. So nobody counts: we do it here, and
    # the reader is given a counter that is not there, which torch passes over in silence. Who is there say the pipes.
    torch.UntypedStorage._release_ipc_counter_cuda(fields[_COUNTER], fields[_COUNTER + 1])
    fields[_COUNTER] = _NO_COUNTER
    numbers = [field.hex() if isinstance(field, bytes) else field for field in fields[7:]]
    return json.dumps({"gpu": str(torch.cuda.get_device_properties(tensor.device).uuid), "offset": fields[3], "fields": numbers})


def _decode_cuda(memory: str, device: torch.device) -> torch.Tensor:
    encoded = json.loads(memory)
    own = str(torch.cuda.get_device_properties(device).uuid)
    if own != encoded["gpu"]:
        raise WeightTransferError(
            f"the weights lie on the GPU {encoded['gpu']}, this engine rank works on {own}: the placement is not the plan's"
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
