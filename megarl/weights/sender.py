"""One trainer rank's part in giving weights away: its stage's buckets, assembled in two buffers that take turns.

While an engine reads one buffer (or a broadcast or a file takes it) the next bucket is assembled in the other. Everything that
a rank holds for this beside its parameters is at most two times `bucket_bytes`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.machine.memory import PeakMemory
from megarl.weights.bucket import Parcel, SegmentHandle
from megarl.weights.gather import Bucket, BucketGatherer, Shards
from megarl.weights.receipt import WeightTransferError
from megarl.weights.shared_memory import Segment
from megarl.weights.weight_group import WeightGroup


class SenderReport(NamedTuple):
    """Of one rank and one pass. gather_s: waiting for the shards of other ranks; convert_s: copying into Hugging Face's layout;
    transport_s: from handing a bucket over until it was taken, as far as the sender sees it. nbytes: given away by this rank.
    planned_extra_bytes: of all buffers; measured_extra_bytes: the most memory that the process took beyond what it had, in which
    buffers that were kept from the pass before do not count."""

    gather_s: float
    convert_s: float
    transport_s: float
    nbytes: int
    planned_extra_bytes: int
    measured_extra_bytes: int


class Outlet(ABC):
    """Where the buckets of a stage go. One on tensor-parallel rank 0 of the stage."""

    transport_s = 0.0
    nbytes = 0  # of its buffers

    @abstractmethod
    def buffer(self, slot: int) -> torch.Tensor:
        """The flat buffer `slot` (0 or 1) once nobody reads it any more. Does not raise: see `hand_over`."""

    @abstractmethod
    def hand_over(self, slot: int, bucket: Bucket) -> SegmentHandle | str:
        """Says where the bucket in buffer `slot` can be had. Raises WeightTransferError where an earlier one could not be sent."""

    @abstractmethod
    def close(self) -> None:
        """Waits until everything is sent, gives the buffers back. Raises as `hand_over`."""

    @abstractmethod
    def abandon(self) -> None:
        """Gives the buffers back as soon as can be; what was not sent is not sent."""


class KeptSegments:
    """Two segments that stay from one pass to the next: the system takes longer to make memory than a bucket takes to be copied."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def take(self, nbytes: int, device: torch.device) -> list[Segment]:
        """Those of the last pass, if they are as large."""
        if any(segment.handle.nbytes != nbytes for segment in self._segments):
            self.close()
        if not self._segments:
            self._segments = [Segment.create(nbytes, device) for _ in range(2)]
        return self._segments

    def close(self) -> None:
        """Gives the memory back."""
        for segment in self._segments:
            segment.close()
        self._segments = []


class SegmentOutlet(Outlet):
    """Engines of the same node read the buffers themselves; who asks for buckets sees to it that they have read them."""

    def __init__(self, kept: KeptSegments, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._kept, self._segments = kept, kept.take(numel * dtype.itemsize, device)
        self._buffers = [segment.tensor(dtype, numel) for segment in self._segments]
        self.nbytes = sum(segment.handle.nbytes for segment in self._segments)

    def buffer(self, slot: int) -> torch.Tensor:
        return self._buffers[slot]

    def hand_over(self, slot: int, bucket: Bucket) -> SegmentHandle:
        if self._buffers[slot].is_cuda:
            torch.cuda.synchronize(self._buffers[slot].device)  # readers do not share our stream
        return self._segments[slot].handle

    def close(self) -> None:
        self._buffers = []

    def abandon(self) -> None:
        self._buffers = []
        self._kept.close()


class BroadcastOutlet(Outlet):
    """To all engines in a group, in the background."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, group: WeightGroup, group_name: str) -> None:
        self._buffers = [torch.empty(numel, dtype=dtype, device=device) for _ in range(2)]
        self._under_way: list[tuple[dist.Work, float] | None] = [None, None]
        self._group, self._name = group, group_name
        self._failure: WeightTransferError | None = None
        self.nbytes = sum(buffer.nbytes for buffer in self._buffers)

    def buffer(self, slot: int) -> torch.Tensor:
        """A failure is kept for later: the ranks of the stage must finish assembling the bucket, or their messages get out of step."""
        self._finish(slot)
        return self._buffers[slot]

    def hand_over(self, slot: int, bucket: Bucket) -> str:
        self._raise_failure()
        self._under_way[slot] = (self._group.broadcast(self._buffers[slot][: bucket.volume]), time.perf_counter())
        return self._name

    def close(self) -> None:
        for slot in range(2):
            self._finish(slot)
        self._buffers = []
        self._raise_failure()

    def abandon(self) -> None:
        self._buffers, self._under_way = [], [None, None]

    def _finish(self, slot: int) -> None:
        if (under_way := self._under_way[slot]) is None:
            return
        work, start_s = under_way
        self._under_way[slot] = None
        try:
            self._group.wait_for(work)
        except WeightTransferError as error:
            self._failure = error
        self.transport_s += time.perf_counter() - start_s

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class WeightSender:
    """A pass over the weights of a stage, on one of its ranks. All tensor-parallel ranks of the stage must ask for every parcel,
    in step; only rank 0 has an outlet, and only its parcels have chunks."""

    def __init__(self, gatherer: BucketGatherer, outlet: Outlet | None, dtype: torch.dtype, peak: PeakMemory) -> None:
        assert (outlet is not None) == (gatherer.rank == 0)
        self._gatherer, self._outlet, self._dtype, self._peak = gatherer, outlet, dtype, peak
        self._buckets: Iterator[tuple[int, Bucket]] = enumerate(gatherer.buckets)
        self._nbytes = 0

    def next_parcel(self) -> Parcel:
        """Without chunks after the last one, and on ranks other than 0."""
        nothing = Parcel((), self._dtype, "")
        number, bucket = next(self._buckets, (0, None))
        if bucket is None:
            return nothing
        if self._outlet is None:
            self._gatherer.gather(bucket, None)
            return nothing
        slot = number % 2
        self._gatherer.gather(bucket, self._outlet.buffer(slot)[: bucket.volume])
        parcel = Parcel(bucket.chunks, self._dtype, self._outlet.hand_over(slot, bucket))
        self._nbytes += parcel.nbytes
        return parcel

    def send_all(self) -> None:
        """For outlets that need nobody to take the parcels."""
        for _ in self._gatherer.buckets:
            self.next_parcel()

    def abandon(self) -> None:
        """Gives all buffers back without waiting for what is under way: what was sent is void."""
        if self._outlet is not None:
            self._outlet.abandon()

    def end(self) -> SenderReport:
        """Waits until everything is sent, and gives all buffers back. Raises WeightTransferError where it was not received."""
        outlet_bytes, transport_s = 0, 0.0
        if self._outlet is not None:
            outlet_bytes = self._outlet.nbytes
            self._outlet.close()
            transport_s = self._outlet.transport_s
        return SenderReport(
            gather_s=self._gatherer.gather_s,
            convert_s=self._gatherer.convert_s,
            transport_s=transport_s,
            nbytes=self._nbytes,
            planned_extra_bytes=outlet_bytes + self._gatherer.nbytes,
            measured_extra_bytes=self._peak.extra_bytes(),
        )


def open_sender(
    shards: Shards, bucket_bytes: int, dtype: torch.dtype, kept: KeptSegments, group: WeightGroup | None = None, group_name: str = ""
) -> WeightSender:
    """Into memory that engines of this node read, `kept` for the next pass, or to those of `group`.

    Raises ValueError where `bucket_bytes` holds no element.
    """
    peak = PeakMemory(shards.device)
    gatherer = BucketGatherer(shards, bucket_bytes, dtype)
    outlet: Outlet | None = None
    if gatherer.rank == 0:
        numel = gatherer.largest_volume
        outlet = (
            SegmentOutlet(kept, numel, dtype, shards.device)
            if group is None
            else BroadcastOutlet(numel, dtype, shards.device, group, group_name)
        )
    return WeightSender(gatherer, outlet, dtype, peak)
