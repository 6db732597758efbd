"""What every engine process opens its parcels with, wherever they lie."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from megarl.weights.bucket import GroupAddress, Parcel, SegmentHandle
from megarl.weights.receipt import TensorChunk, WeightTransferError
from megarl.weights.shared_memory import SegmentReader
from megarl.weights.stream import StreamReader, WeightStream
from megarl.weights.weight_group import WeightGroup


class ParcelReceiver:
    """One process of an engine. `device`: where received parcels are put. `transport_s`: seconds spent on fetching so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._segments = SegmentReader()
        self._groups: dict[str, WeightGroup] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)  # of the largest parcel received, kept for the next
        self._stream: StreamReader | None = None
        self.transport_s = 0.0

    def join(self, address: GroupAddress, rank: int) -> None:
        """Raises WeightTransferError where not all ranks of the group come in time."""
        if (former := self._groups.pop(address.name, None)) is not None:
            former.close()
        self._groups[address.name] = WeightGroup(address, rank, self._device)

    def join_streams(self, streams: Sequence[WeightStream], number: int) -> None:
        """As reader `number`, in the place of those joined before. Raises WeightTransferError where they are gone."""
        self._leave_streams()
        self._stream = StreamReader(streams, number)

    @property
    def stream(self) -> StreamReader:
        """Raises WeightTransferError where none was joined."""
        if self._stream is None:
            raise WeightTransferError("no stream of weights was joined")
        return self._stream

    def _leave_streams(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def leave(self) -> None:
        """Leaves all groups and streams, and gives the memory for parcels back."""
        self._leave_streams()
        for group in self._groups.values():
            group.close()
        self._groups = {}
        self.release()
        self._segments.close()

    def release(self) -> None:
        """After the last parcel: gives back memory that was kept for the next. What others own stays mapped, for the next update."""
        self._segments.forget_devices()
        self._buffer = self._buffer.new_empty(0)

    def open(self, parcel: Parcel) -> Iterator[TensorChunk]:
        """The chunks, to be copied from before the next one is asked for; when the iteration ends all copies are made.

        Raises WeightTransferError where the sender is gone, or the parcel is of a group that was not joined.
        """
        if not parcel.chunks:
            return
        start_s = time.perf_counter()
        data = self._fetch(parcel)
        self.transport_s += time.perf_counter() - start_s
        for chunk, elements in zip(parcel.chunks, data.split([chunk.numel for chunk in parcel.chunks]), strict=True):
            yield TensorChunk(chunk.name, chunk.offset, elements)
        if data.is_cuda:
            torch.cuda.synchronize(data.device)  # the sender overwrites the segment next

    def _fetch(self, parcel: Parcel) -> torch.Tensor:
        if isinstance(parcel.where, SegmentHandle):
            return self._segments.open(parcel.where, parcel.dtype, parcel.numel)
        group = self._groups.get(parcel.where)
        if group is None:
            raise WeightTransferError(f"a parcel is to be received in weight group {parcel.where!r}; joined are {sorted(self._groups)}")
        if self._buffer.numel() < parcel.nbytes:
            self._buffer = self._buffer.new_empty(0)  # the old one goes before the new one comes
            self._buffer = self._buffer.new_empty(parcel.nbytes)
        data = self._buffer[: parcel.nbytes].view(parcel.dtype)
        group.wait_for(group.broadcast(data))
        return data
