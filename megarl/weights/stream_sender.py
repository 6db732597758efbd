"""One trainer rank's part in a stream of weights to the engines of its node: it copies what it has of every bucket straight into
memory that all tensor-parallel ranks of its stage share, so that nothing is gathered and every element is copied once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megarl.machine.memory import PeakMemory
from megarl.weights.gather import Bucket, BucketSizes, Shards, plan_buckets
from megarl.weights.sender import SenderReport
from megarl.weights.stream import NUM_SLOTS, StreamSource, StreamWriter, WeightStream

MAX_SLOT_BYTES = 4 * 2**20  # what is read soon after it was written comes out of the processor's cache


class _Copy(NamedTuple):
    """Of `shard_view` of a parameter, the part `in_shard` goes to `target`, a view of a slot."""

    parameter: str
    shard_view: tuple[int, ...]
    in_shard: tuple[slice, ...]
    target: torch.Tensor


def open_stream(shards: Shards, bucket_bytes: int, num_readers: int) -> tuple[StreamSource, WeightStream]:
    """Of the stage of `shards`, for all its tensor-parallel ranks to write and `num_readers` engine ranks to read.

    Raises ValueError where `bucket_bytes` holds no element, or for more ranks than a stream can have.
    """
    buckets = _buckets(shards, bucket_bytes)
    slot_numel = max(bucket.volume for bucket in buckets)
    source = StreamSource(slot_numel * shards.dtype.itemsize, shards.layout.tensor_parallel_size, num_readers)
    return source, WeightStream(source.address, shards.dtype, slot_numel, tuple(bucket.chunks for bucket in buckets))


class StreamSender:
    """Sends pass after pass. `source`: where this rank made the stream.

    Raises WeightTransferError where the stream is gone.
    """

    def __init__(self, shards: Shards, bucket_bytes: int, stream: WeightStream, source: StreamSource | None) -> None:
        rank = shards.layout.tensor_parallel_rank
        self._source = source
        self._writer = StreamWriter(stream.address, rank, source.data if source else None)
        buckets = _buckets(shards, bucket_bytes)
        self._copies = [_copies(bucket, self._writer.slot(number, stream.dtype), rank) for number, bucket in enumerate(buckets)]
        self._nbytes = sum(copy.target.nbytes for copies in self._copies for copy in copies)
        self._held_bytes = 0  # of the slots, in memory before a pass begins
        self._pass: _Pass | None = None

    def send(self, shards: Shards) -> SenderReport | None:
        """All buckets, of the weights as they are at the first call; None where the engines say nothing for a while: to be called
        again, it goes on."""
        if self._pass is None:
            self._pass = _Pass(PeakMemory(shards.device))
        under_way = self._pass
        with torch.no_grad():
            while under_way.position < len(self._copies):
                if not under_way.wait(self._writer.may_write, under_way.position):
                    return None
                under_way.copy(self._copies[under_way.position], shards)
                self._writer.has_written()
                under_way.position += 1
        if not under_way.wait(self._writer.is_read, len(self._copies)):
            return None
        self._pass = None
        extra_bytes = under_way.peak.extra_bytes() + self._held_bytes
        self._held_bytes = self._writer.nbytes
        return SenderReport(
            gather_s=0.0,
            convert_s=under_way.convert_s,
            transport_s=under_way.wait_s,
            nbytes=self._nbytes,
            planned_extra_bytes=self._writer.nbytes,
            measured_extra_bytes=extra_bytes,
        )

    def release(self) -> None:
        """Between two passes: gives the memory of the slots back until the next. Every rank of the stage is to be told."""
        if self._source is not None:
            self._source.empty()
        self._held_bytes = 0

    def close(self) -> None:
        """Gives the memory back, whatever is under way."""
        self._copies = []
        self._writer.close()
        if self._source is not None:
            self._source.close()


class _Pass:
    """position: of the next bucket. Seconds as in SenderReport."""

    def __init__(self, peak: PeakMemory) -> None:
        self.position, self.convert_s, self.wait_s = 0, 0.0, 0.0
        self.peak = peak

    def wait(self, condition: Callable[[int], bool], number: int) -> bool:
        start_s = time.perf_counter()
        is_met = condition(number)
        self.wait_s += time.perf_counter() - start_s
        return is_met

    def copy(self, copies: list[_Copy], shards: Shards) -> None:
        start_s = time.perf_counter()
        for name, shard_view, in_shard, target in copies:
            target.copy_(shards.parameters[name].view(shard_view)[in_shard])
        self.convert_s += time.perf_counter() - start_s


def _buckets(shards: Shards, bucket_bytes: int) -> tuple[Bucket, ...]:
    slot_bytes = min(2 * bucket_bytes // NUM_SLOTS, MAX_SLOT_BYTES)  # all slots are at most two buckets
    return plan_buckets(shards.architecture, shards.layout, BucketSizes.of_slot(slot_bytes, shards.dtype), shards.head)


def _copies(bucket: Bucket, slot: torch.Tensor, rank: int) -> list[_Copy]:
    copies, position = [], 0
    for block in bucket.blocks:
        region = slot[position : position + block.volume].view(block.shape)
        position += block.volume
        copies += [
            _Copy(block.megatron_name, transfer.shard_view, transfer.in_shard.slices, region[transfer.in_block.slices])
            for transfer in block.transfers
            if transfer.rank == rank
        ]
    return copies
