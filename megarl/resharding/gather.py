"""Turns the Megatron shards of one pipeline stage into buckets of Hugging Face tensors, in bounded memory.

`plan_buckets` is pure: it says which rank sends which rectangle of which parameter into which bucket. `iterate_buckets`
executes it with point-to-point transfers to tensor-parallel rank 0, one message per rank and bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist

from megarl.config.architecture import Architecture
from megarl.protocol.weights import TensorChunk, WeightBucket
from megarl.resharding.families import Head
from megarl.resharding.layout import Piece, ShardLayout, held_weights, pieces
from megarl.protocol.rectangles import Rectangle, contiguous_blocks


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


Bucket = tuple[Block, ...]

_BLOCKS_PER_BUCKET = 8  # tensors are cut this fine, so that a bucket is closed with at most an eighth of it empty


@lru_cache(maxsize=8)  # the same plan serves every step
def plan_buckets(
    architecture: Architecture, layout: ShardLayout, bucket_bytes: int, dtype: torch.dtype, head: Head = "lm"
) -> tuple[Bucket, ...]:
    """The buckets of the stage that `layout` describes; every tensor-parallel rank of it computes the same plan.

    Each Hugging Face tensor that the stage is the source of comes exactly once; padded vocabulary rows and the tied copy
    of the output layer do not come at all. Raises ValueError where `bucket_bytes` holds no element.
    """
    max_volume = bucket_bytes // dtype.itemsize
    if max_volume < 1:
        raise ValueError(f"bucket of {bucket_bytes} bytes holds no {dtype} element; give resharding.bucket_mb a larger value")
    buckets: list[Bucket] = []
    current: list[Block] = []
    room = max_volume
    for block in _blocks(architecture, layout, max(1, max_volume // _BLOCKS_PER_BUCKET), head):
        if block.volume > room:
            buckets.append(tuple(current))
            current, room = [], max_volume
        current.append(block)
        room -= block.volume
    return (*buckets, tuple(current)) if current else tuple(buckets)


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


def iterate_buckets(
    parameters: Mapping[str, torch.Tensor],
    architecture: Architecture,
    layout: ShardLayout,
    tensor_parallel_group: dist.ProcessGroup | None,
    bucket_bytes: int,
    dtype: torch.dtype,
    head: Head = "lm",
) -> Iterator[WeightBucket]:
    """Streams the stage's weights as buckets of at most `bucket_bytes`, converted to `dtype`.

    Every tensor-parallel rank of the stage must iterate to the end: each yields as many buckets, those of ranks other
    than 0 empty. Beside the parameters, rank 0 holds at most two buckets' bytes (what arrives, and the bucket made of
    it), another rank one; a bucket that was yielded stays the caller's. The group may be None where
    tensor_parallel_size is 1. parameters: Megatron name with global layer number -> contiguous tensor.
    """
    rank = layout.tensor_parallel_rank
    for bucket in plan_buckets(architecture, layout, bucket_bytes, dtype, head):
        if rank == 0:
            yield _assemble(bucket, parameters, layout.tensor_parallel_size, tensor_parallel_group, dtype)
        else:
            assert tensor_parallel_group is not None
            _send(bucket, parameters, rank, tensor_parallel_group, dtype)
            yield WeightBucket(())


def _contribution(bucket: Bucket, rank: int) -> Iterator[tuple[int, Transfer, int, int]]:
    """(index of the block, transfer, start, stop): what a rank gives to a bucket, and where it lies in its flat message."""
    start = 0
    for index, block in enumerate(bucket):
        for transfer in block.transfers:
            if transfer.rank == rank:
                stop = start + transfer.in_block.volume
                yield index, transfer, start, stop
                start = stop


def _message_length(bucket: Bucket, rank: int) -> int:
    return sum(stop - start for _, _, start, stop in _contribution(bucket, rank))


def _shard_region(parameters: Mapping[str, torch.Tensor], block: Block, transfer: Transfer) -> torch.Tensor:
    return parameters[block.megatron_name].detach().view(transfer.shard_view)[transfer.in_shard.slices]


def _send(bucket: Bucket, parameters: Mapping[str, torch.Tensor], rank: int, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    length = _message_length(bucket, rank)
    if not length:
        return
    message = torch.empty(length, dtype=dtype, device=_device(parameters))
    for index, transfer, start, stop in _contribution(bucket, rank):
        message[start:stop].view(transfer.in_block.shape).copy_(_shard_region(parameters, bucket[index], transfer))
    dist.send(message, dst=dist.get_global_rank(group, 0), group=group)


def _assemble(
    bucket: Bucket, parameters: Mapping[str, torch.Tensor], num_ranks: int, group: dist.ProcessGroup | None, dtype: torch.dtype
) -> WeightBucket:
    device = _device(parameters)
    lengths = {rank: _message_length(bucket, rank) for rank in range(1, num_ranks)}
    messages = {rank: torch.empty(length, dtype=dtype, device=device) for rank, length in lengths.items() if length}
    requests = []
    for rank, message in messages.items():
        assert group is not None
        request = dist.irecv(message, src=dist.get_global_rank(group, rank), group=group)
        assert request is not None, "this rank is not in the tensor-parallel group it was given"
        requests.append(request)

    ends = list(accumulate(block.volume for block in bucket))
    flat = torch.empty(ends[-1], dtype=dtype, device=device)
    data = [flat[end - block.volume : end] for block, end in zip(bucket, ends, strict=True)]
    regions = [elements.view(block.shape) for block, elements in zip(bucket, data, strict=True)]
    for index, transfer, _, _ in _contribution(bucket, 0):  # while the messages of the others travel
        regions[index][transfer.in_block.slices].copy_(_shard_region(parameters, bucket[index], transfer))
    for request in requests:
        request.wait()
    for rank, message in messages.items():
        for index, transfer, start, stop in _contribution(bucket, rank):
            regions[index][transfer.in_block.slices].copy_(message[start:stop].view(transfer.in_block.shape))
    return WeightBucket(tuple(TensorChunk(block.hf_name, block.offset, elements) for block, elements in zip(bucket, data, strict=True)))


def _device(parameters: Mapping[str, torch.Tensor]) -> torch.device:
    return next(iter(parameters.values())).device
