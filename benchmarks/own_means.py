"""The trainer's side of benchmarks/resharding.py: what the means of a transport take by themselves for as many bytes, as limits."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from megarl.controller.register import register
from megarl.weights.bucket import GroupAddress
from megarl.weights.weight_group import WeightGroup
from megarl.workers.megatron import MegatronWorker


def broadcast_seconds(group: WeightGroup, nbytes: int, bucket_bytes: int) -> float:
    """Of one member: bytes that nobody fills or reads, in buckets, from two buffers that take turns."""
    buffers = [torch.ones(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
    group.wait_for(group.broadcast(buffers[0][:1]))  # all are there
    start_s = time.perf_counter()
    under_way = []
    for position in range(0, nbytes, bucket_bytes):
        if len(under_way) == 2:
            group.wait_for(under_way.pop(0))
        under_way.append(group.broadcast(buffers[position // bucket_bytes % 2][: min(bucket_bytes, nbytes - position)]))
    for work in under_way:
        group.wait_for(work)
    return time.perf_counter() - start_s


def files_seconds(folder: Path, nbytes: int, bucket_bytes: int) -> float:
    """Of a file that is written and read in buckets, as far as the system's cache of files; it is not forced onto the disk."""
    folder.mkdir(exist_ok=True)
    buffer, path = memoryview(bytearray(bucket_bytes)), folder / "bytes"
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for position in range(0, nbytes, bucket_bytes):
            _all(os.write, file.fileno(), buffer[: min(bucket_bytes, nbytes - position)])
    with path.open("rb", buffering=0) as file:
        for position in range(0, nbytes, bucket_bytes):
            _all(lambda descriptor, rest: os.readv(descriptor, [rest]), file.fileno(), buffer[: min(bucket_bytes, nbytes - position)])
    seconds = time.perf_counter() - start_s
    path.unlink()
    return seconds


def _all(function, descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[function(descriptor, rest) :]


class MeasuredTrainer(MegatronWorker):
    @register()
    def broadcast_seconds(self, address: GroupAddress, nbytes: int, bucket_bytes: int) -> float:
        """Rank 0 of a group of two, at the port that `reserve_weight_group` has taken."""
        listener, self._listener = self._listener, None
        group = WeightGroup(address, 0, torch.device("cpu"), listener)
        try:
            return broadcast_seconds(group, nbytes, bucket_bytes)
        finally:
            group.close()

    @register()
    def files_seconds(self, folder: str, nbytes: int, bucket_bytes: int) -> float:
        return files_seconds(Path(folder), nbytes, bucket_bytes)
