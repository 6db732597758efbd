"""Turns the Megatron shards of one pipeline stage into buckets of Hugging Face tensors, in bounded memory.

`plan_buckets` is pure: it says which rank sends which rectangle of which parameter into which bucket. `BucketGatherer`
executes it with point-to-point transfers to tensor-parallel rank 0: a bucket in rounds, with one message per rank and round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.config.architecture import Architecture
from megarl.weights.boxes import Rectangle, contiguous_blocks
from megarl.weights.bucket import ChunkMeta
from megarl.weights.name_mapping import Head
from megarl.weights.shard_layout import Piece, ShardLayout, held_weights, pieces
from megarl.weights.shards import Shards


@dataclass(frozen=True)
class Transfer:
    """A rectangle of `shard_view` of the rank's parameter that becomes the rectangle `in_block` of a block."""

    rank: int  # tensor-parallel
    shard_view: tuple[int, ...]
    in_shard: Rectangle
    in_block: Rectangle


@dataclass(frozen=True)
class Block:
    """Elements [offset, offset + volume) of a Hugging Face tensor, as a rectangle of shape `shape` in its view."""

    hf_name: str
    megatron_name: str
    offset: int
    shape: tuple[int, ...]
    transfers: tuple[Transfer, ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)


class BucketSizes(NamedTuple):
    """How `bucket_bytes` is used, in elements: two buckets and two messages under way are at most two times `bucket_bytes`.

    message: of a round, in all ranks' messages together. block: tensors are cut this fine, so that a bucket is closed with at
    most an eighth of it empty.
    """

    bucket: int
    message: int
    block: int

    @classmethod
    def of(cls, bucket_bytes: int, dtype: torch.dtype) -> BucketSizes:
        """Raises ValueError where `bucket_bytes` holds no element."""
        total = bucket_bytes // dtype.itemsize
        message = max(1, total // 8)
        bucket = total - message
        if bucket < 1:
            raise ValueError(f"a bucket of {bucket_bytes} bytes has no room for a {dtype} element; give a larger resharding.bucket_mb")
        return cls(bucket, message, max(1, bucket // 8))

    @classmethod
    def of_slot(cls, slot_bytes: int, dtype: torch.dtype) -> BucketSizes:
        """Where nothing is gathered: blocks as large as can be, so that there are few. Raises as `of`."""
        whole = slot_bytes // dtype.itemsize
        if whole < 1:
            raise ValueError(f"a slot of {slot_bytes} bytes has no room for a {dtype} element; give a larger resharding.bucket_mb")
        return cls(whole, whole, whole)


Round = tuple[Block, ...]


@dataclass(frozen=True)
class Bucket:
    """Blocks that lie back to back in the order of `rounds`."""

    rounds: tuple[Round, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for blocks in self.rounds for block in blocks)

    @property
    def volume(self) -> int:
        return sum(block.volume for block in self.blocks)

    @property
    def chunks(self) -> tuple[ChunkMeta, ...]:
        return tuple(ChunkMeta(block.hf_name, block.offset, block.volume) for block in self.blocks)


@lru_cache(maxsize=8)  # the same plan serves every step
def plan_buckets(architecture: Architecture, layout: ShardLayout, sizes: BucketSizes, head: Head = "lm") -> tuple[Bucket, ...]:
    """The buckets of the stage that `layout` describes; every tensor-parallel rank of it computes the same plan.

    Each Hugging Face tensor that the stage is the source of comes exactly once; padded vocabulary rows and the tied copy
    of the output layer do not come at all.
    """
    blocks = list(_blocks(architecture, layout, sizes.block, head))
    return tuple(Bucket(tuple(map(tuple, _filled(bucket, sizes.message)))) for bucket in _filled(blocks, sizes.bucket))


def _filled(blocks: Sequence[Block], max_volume: int) -> list[list[Block]]:
    """Cut into runs of at most `max_volume` elements."""
    runs: list[list[Block]] = []
    room = 0
    for block in blocks:
        if block.volume > room:
            runs.append([])
            room = max_volume
        runs[-1].append(block)
        room -= block.volume
    return runs


def _blocks(architecture: Architecture, layout: ShardLayout, max_block_volume: int, head: Head) -> Iterator[Block]:
    ranks = [replace(layout, tensor_parallel_rank=rank) for rank in range(layout.tensor_parallel_size)]
    for weight in held_weights(architecture, layout, head):
        sources = [(rank.tensor_parallel_rank, piece) for rank in ranks for piece in pieces(weight, rank) if piece.is_source]
        for tensor in weight.tensors:
            of_tensor = [(rank, piece) for rank, piece in sources if piece.hf_name == tensor.name]
            if not of_tensor:
                continue
            for offset, block in contiguous_blocks(tensor.view, max_block_volume):
                transfers = tuple(transfer for rank, piece in of_tensor for transfer in _transfers(rank, piece, block))
                yield Block(tensor.name, weight.megatron_name, offset, block.shape, transfers)


def _transfers(rank: int, piece: Piece, block: Rectangle) -> Iterator[Transfer]:
    if (shared := piece.hf.intersect(block)) is not None:
        in_shard = shared.relative_to(piece.hf.starts, piece.shard.starts)
        yield Transfer(rank, piece.shard_view, in_shard, shared.relative_to(block.starts))


class BucketGatherer:
    """One rank's part in assembling the buckets of its stage, converted to `dtype`. Every tensor-parallel rank of the stage must
    gather every bucket, in order. Holds the two messages that are under way.

    gather_s, convert_s: seconds spent on waiting for messages, and on copying, so far.
    """

    def __init__(self, shards: Shards, bucket_bytes: int, dtype: torch.dtype) -> None:
        self._shards = shards
        self.rank = shards.layout.tensor_parallel_rank
        sizes = BucketSizes.of(bucket_bytes, dtype)
        self.buckets = plan_buckets(shards.architecture, shards.layout, sizes, shards.head)
        length = sizes.message if shards.layout.tensor_parallel_size > 1 else 0
        self._messages = torch.empty(2, length, dtype=dtype, device=shards.device)
        self.gather_s = 0.0
        self.convert_s = 0.0

    @property
    def nbytes(self) -> int:
        return self._messages.nbytes

    @property
    def largest_volume(self) -> int:
        return max(bucket.volume for bucket in self.buckets)

    def gather(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        """On rank 0 `flat` (bucket.volume elements) becomes the bucket; the other ranks have none and send their parts."""
        if self.rank == 0:
            assert flat is not None
            self._receive(bucket, flat)
        else:
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        under_way: list[dist.Work | None] = [None, None]
        for index, blocks in enumerate(bucket.rounds):
            self._wait(under_way[index % 2])
            start_s = time.perf_counter()
            length = 0
            for part in _contribution(blocks, self.rank):
                target = self._messages[index % 2, part.start : part.stop].view(part.transfer.in_block.shape)
                target.copy_(self._region(blocks[part.block], part.transfer))
                length = part.stop
            self.convert_s += time.perf_counter() - start_s
            under_way[index % 2] = self._transfer(dist.isend, 0, self._messages[index % 2, :length]) if length else None
        for work in under_way:
            self._wait(work)

    def _receive(self, bucket: Bucket, flat: torch.Tensor) -> None:
        expected = [self._expect(bucket.rounds[0], 0)]
        position = 0
        for index, blocks in enumerate(bucket.rounds):
            if index + 1 < len(bucket.rounds):  # it travels while this round is copied
                expected.append(self._expect(bucket.rounds[index + 1], (index + 1) % 2))
            regions = []
            for block in blocks:
                regions.append(flat[position : position + block.volume].view(block.shape))
                position += block.volume
            self._copy(blocks, 0, regions, None)
            for rank, message, work in expected[index]:
                self._wait(work)
                self._copy(blocks, rank, regions, message)
            expected[index] = []

    def _expect(self, blocks: Round, slot: int) -> list[tuple[int, torch.Tensor, dist.Work]]:
        """Starts to receive the messages of all other ranks; they lie side by side in one of the two places."""
        lengths = [_message_length(blocks, rank) for rank in range(1, self._shards.layout.tensor_parallel_size)]
        ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
        messages = [self._messages[slot, start:stop] for start, stop in pairwise(ends)]
        return [
            (rank, message, self._transfer(dist.irecv, rank, message)) for rank, message in enumerate(messages, start=1) if message.numel()
        ]

    def _copy(self, blocks: Round, rank: int, regions: Sequence[torch.Tensor], message: torch.Tensor | None) -> None:
        """What `rank` gives, from its message or from this rank's own shards."""
        start_s = time.perf_counter()
        for part in _contribution(blocks, rank):
            shape = part.transfer.in_block.shape
            source = self._region(blocks[part.block], part.transfer) if message is None else message[part.start : part.stop].view(shape)
            regions[part.block][part.transfer.in_block.slices].copy_(source)
        self.convert_s += time.perf_counter() - start_s

    def _region(self, block: Block, transfer: Transfer) -> torch.Tensor:
        return self._shards.parameters[block.megatron_name].detach().view(transfer.shard_view)[transfer.in_shard.slices]

    def _transfer(self, function: Callable[..., dist.Work | None], peer: int, message: torch.Tensor) -> dist.Work:
        group = self._shards.group
        assert group is not None
        work = function(message, dist.get_global_rank(group, peer), group=group)
        assert work is not None, "this rank is not in the tensor-parallel group it was given"
        return work

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            start_s = time.perf_counter()
            work.wait()
            self.gather_s += time.perf_counter() - start_s


class _Part(NamedTuple):
    """block: its number in the round. start, stop: where the transfer lies in the rank's flat message."""

    block: int
    transfer: Transfer
    start: int
    stop: int


def _contribution(blocks: Round, rank: int) -> Iterator[_Part]:
    start = 0
    for index, block in enumerate(blocks):
        for transfer in block.transfers:
            if transfer.rank == rank:
                stop = start + transfer.in_block.volume
                yield _Part(index, transfer, start, stop)
                start = stop


def _message_length(blocks: Round, rank: int) -> int:
    return sum(part.stop - part.start for part in _contribution(blocks, rank))
