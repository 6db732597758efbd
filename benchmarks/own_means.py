"""Measure a transport's underlying means for as many bytes in the trainer, as limits for benchmarks/weights.py."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megarl.controller.worker import register
from megarl.roles.megatron_worker import MegatronWorker
from megarl.weights.p2p import P2PAddress, P2PGroup, PendingMessages, reserve_port


def messages_seconds(p2p: P2PGroup, rank: int, nbytes: int, message_bytes: int) -> float:
    """Measure messages between two ranks, as one of them.

    Uninitialized bytes go from rank 0 to rank 1 and are not read, through two alternating buffers.
    """
    buffers = [torch.ones(message_bytes, dtype=torch.uint8) for _ in range(2)]

    def start(number: int, length: int) -> PendingMessages:
        message = [(1 - rank, buffers[number % 2][:length])]
        return p2p.start(*((message, []) if rank == 0 else ([], message)), number)

    while not start(0, 1)(1.0):  # all are there
        pass
    start_s = time.perf_counter()
    under_way: list[PendingMessages] = []

    for number, position in enumerate(range(0, nbytes, message_bytes), start=1):
        if len(under_way) == 2:
            while not under_way[0](1.0):
                pass
            del under_way[0]
        under_way.append(start(number, min(message_bytes, nbytes - position)))

    for messages in under_way:
        while not messages(1.0):
            pass

    return time.perf_counter() - start_s


def files_seconds(folder: Path, nbytes: int, bucket_bytes: int) -> float:
    """Measure a file that is written and read in buckets.

    The bytes only reach the system's file cache; they are not forced onto the disk.
    """
    folder.mkdir(exist_ok=True)
    buffer = memoryview(bytearray(bucket_bytes))
    path = folder / "bytes"
    start_s = time.perf_counter()

    with path.open("wb", buffering=0) as file:
        for position in range(0, nbytes, bucket_bytes):
            _all(os.write, file.fileno(), buffer[: min(bucket_bytes, nbytes - position)])

    with path.open("rb", buffering=0) as file:
        for position in range(0, nbytes, bucket_bytes):
            _all(
                lambda descriptor, rest: os.readv(descriptor, [rest]),
                file.fileno(),
                buffer[: min(bucket_bytes, nbytes - position)],
            )

    seconds = time.perf_counter() - start_s
    path.unlink()
    return seconds


def _all(function: Callable[[int, memoryview], int], descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[function(descriptor, rest) :]


class MeasuredTrainer(MegatronWorker):
    @register()
    def reserve(self, limit_s: float) -> P2PAddress:
        self._listener = reserve_port(self.node)
        return P2PAddress("limit", self.node, self._listener.getsockname()[1], 2, "gloo", limit_s)

    @register()
    def messages_seconds(self, address: P2PAddress, nbytes: int, message_bytes: int) -> float:
        """Rank 0 of a group of two, at the port that `reserve` has taken."""
        p2p = P2PGroup.join(address, 0, torch.device("cpu"), self._listener)

        try:
            return messages_seconds(p2p, 0, nbytes, message_bytes)
        finally:
            p2p.close()

    @register()
    def change_weights(self, share: float) -> None:
        """Change the sign of a share of all elements, at random."""
        for parameter in self._shards().parameters.values():
            is_changed = torch.rand(parameter.shape) < share
            parameter.data.copy_(torch.where(is_changed, -parameter.data, parameter.data))

    @register()
    def files_seconds(self, folder: str, nbytes: int, bucket_bytes: int) -> float:
        return files_seconds(Path(folder), nbytes, bucket_bytes)
