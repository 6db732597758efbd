"""The transport `folder` with patches: files with what changed since an engine's last weights.

In a sync, each trainer rank writes a file for each engine rank that it has elements for, to a new folder.
All replicas read the same files: each engine rank those written for its number. A file consists of the
messages of the transport `group` with patches, each after a header with its bytes, its number of patches,
and a checksum.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import torch

from megarl.weights.acknowledged import (
    AcknowledgedWeights,
    PatchMessage,
    most_message_bytes,
    patch_chunks,
    read_message,
)
from megarl.weights.schedule import ScheduleKey, TransferSchedule
from megarl.weights.tensors import WeightTransferError
from megarl.weights.transfer import Transfer
from megarl.weights.transports.delta import PatchStreams
from megarl.weights.transports.interface import (
    DestinationViews,
    Endpoint,
    Sender,
    SentShards,
    TransferReceiver,
)

_HEADER = struct.Struct("<qqI")  # bytes, patches, CRC-32 of the bytes


def patch_file(folder: Path, source: int, target: int) -> Path:
    """Return the file that a trainer rank writes for an engine rank."""
    return folder / f"{source}-to-{target}.patches"


class PatchFolderSender(Sender):
    """Writes patches for replicas that acknowledged earlier weights, and everything for others.

    Args:
        rank: The trainer rank.
        dtype: The dtype of the weights that are sent.

    Attributes:
        folder: Where the next pass writes its files. It must be empty.
    """

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self._rank = rank
        self._dtype = dtype
        self._streams = PatchStreams()
        self.folder = Path()

    def join(self, replica: int, schedules: Mapping[int, TransferSchedule]) -> None:
        """Add a replica.

        Args:
            replica: The replica.
            schedules: By the numbers of the engine's ranks; the same for every replica.
        """
        self._streams.join(replica, schedules, self._dtype)

    def forget_weights(self, replica: int) -> None:
        """Send everything to the replica the next time, since it no longer has what it acknowledged."""
        self._streams.forget(replica)

    def _new_transfer(self, shards: SentShards, replicas: Collection[int], first_round: int) -> Transfer:
        assert first_round == 0, "patches are for models that change as a whole"
        sent = self._streams.begin(replicas, shards.device)
        # Every replica reads the same files, and equal schedules have equal files.
        files: dict[ScheduleKey, list[Path]] = {key: [] for key in sent}
        for target, key in self._streams.schedules[next(iter(replicas))].items():
            files[key].append(patch_file(self.folder, self._rank, target))
        return _PatchWrites([(sent[key], paths) for key, paths in files.items()], shards)

    def leave(self, replica: int) -> None:
        self._streams.leave(replica)

    def release(self) -> None:
        self._streams.release()

    def close(self) -> None:
        self._streams.close()


class _PatchWrites(Transfer):
    """Writes the files of one pass. Each appears under its name when it is complete.

    Args:
        writes: The weights, with the files that they are written to.
        shards: The current weights.
    """

    def __init__(
        self, writes: Sequence[tuple[AcknowledgedWeights, Sequence[Path]]], shards: SentShards
    ) -> None:
        super().__init__([], shards.device)
        self._writes = writes
        self._shards = shards
        self.planned_bytes = sum(weights.num_bytes * len(paths) for weights, paths in writes)
        self.buffer_bytes = sum(weights.buffers.nbytes for weights, _ in writes)

    def _work(self) -> Iterator[None]:
        for weights, paths in self._writes:
            partials = [path.with_suffix(".partial") for path in paths]
            with ExitStack() as stack:
                self._write(weights, [stack.enter_context(partial.open("wb")) for partial in partials])
            for partial, path in zip(partials, paths, strict=True):
                os.replace(partial, path)
            weights.end(weights.replicas)
        yield from ()

    def _write(self, weights: AcknowledgedWeights, files: Sequence[BinaryIO]) -> None:
        while not weights.is_complete:
            with self.packing:
                data, num_patches = weights.next_message(
                    weights.buffers[0], self._shards.regions, self._shards.are_computed
                )
                content = data.cpu().numpy()
            header = _HEADER.pack(content.nbytes, num_patches, zlib.crc32(content))
            for file in files:
                file.write(header)
                file.write(content)
                self.sent_bytes += len(header) + content.nbytes


class PatchFolderReceiver(TransferReceiver):
    """Reads the files for one engine rank.

    Attributes:
        folder: The folder of the next pass.
    """

    def __init__(self, place: Endpoint, device: torch.device) -> None:
        super().__init__()
        self._place = place
        self._device = device
        self._open_files = ExitStack()
        self.folder = Path()

    def _new_transfer(self, destinations: DestinationViews) -> Transfer:
        return _PatchReads(self.folder, self._place.rank, destinations, self._device, self._open_files)

    def close(self) -> None:
        self._open_files.close()
        self._transfer = None


class _PatchReads(Transfer):
    """Reads and applies the files of one pass.

    Args:
        open_files: Closes the files when the pass ends, or earlier if the receiver is closed.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        destinations: DestinationViews,
        device: torch.device,
        open_files: ExitStack,
    ) -> None:
        super().__init__([], device, yields_regularly=True)
        self._folder = folder
        self._rank = rank
        self._destinations = destinations
        self._device = device
        self._open_files = open_files

    def _work(self) -> Iterator[None]:
        with self._open_files:
            for source, schedule in self._destinations.sources.schedules.items():
                yield from self._apply_file(patch_file(self._folder, source, self._rank), schedule)
        self._destinations.is_whole = True

    def _apply_file(self, path: Path, schedule: TransferSchedule) -> Iterator[None]:
        destinations = self._destinations
        chunks = patch_chunks(schedule)
        most = most_message_bytes(schedule, destinations.dtype.itemsize)
        try:
            file = self._open_files.enter_context(path.open("rb"))
        except OSError as error:
            raise WeightTransferError(f"{path}: cannot be read: {error.strerror}") from error

        first = 0
        while first < chunks.num_rounds:
            if not self._has_time:
                yield
            message = _read(file, path, most)
            with self.packing:
                data = message.data.to(self._device)
                for chunk, change in read_message(
                    PatchMessage(data, message.num_patches), chunks, first, destinations.dtype
                ):
                    destinations.apply(chunks.message(chunk), change)
            destinations.received_bytes += _HEADER.size + message.data.nbytes
            first += message.num_patches
        if file.read(1):
            raise WeightTransferError(f"{path}: has more than the patches of {chunks.num_rounds} chunks")


def _read(file: BufferedReader, path: Path, most: int) -> PatchMessage:
    """Read one message of at most `most` bytes."""
    header = file.read(_HEADER.size)
    if len(header) == _HEADER.size:
        num_bytes, num_patches, expected = _HEADER.unpack(header)
        if 0 < num_bytes <= most and num_patches > 0:
            content = bytearray(num_bytes)
            if file.readinto(content) == num_bytes and zlib.crc32(content) == expected:
                return PatchMessage(torch.frombuffer(content, dtype=torch.uint8), num_patches)
    raise WeightTransferError(f"{path}: is damaged before byte {file.tell():,}: its checksum differs")
