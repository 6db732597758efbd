"""How a bucket of weights goes from a trainer to an engine: what is in it, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megarl.weights.receipt import ChunkMeta


class SegmentHandle(NamedTuple):
    """Memory of another process on this node. `kind` "memfd": `address` is a path under /proc that lives as long as the process
    that made it; "cuda": `address` is an encoded CUDA IPC handle. `nbytes`: of the whole segment."""

    kind: str
    address: str
    nbytes: int


class GroupAddress(NamedTuple):
    """A process group in which one trainer rank (rank 0) broadcasts to engine ranks. `backend`: gloo or nccl."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str
    time_limit_s: float


@dataclass(frozen=True)
class Parcel:
    """One bucket. Its chunks lie back to back, in this order, as one flat tensor of `dtype`: at the start of the segment `where`, or
    to be received by a broadcast in the group that `where` names. An empty parcel (no chunks) has nothing to be fetched."""

    chunks: tuple[ChunkMeta, ...]
    dtype: torch.dtype
    where: SegmentHandle | str

    @property
    def numel(self) -> int:
        return sum(chunk.numel for chunk in self.chunks)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize
