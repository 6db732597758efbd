"""The transports `group` and `folder` with patches: only what changed since an engine's last weights is sent.

The messages have no planned size. Each is announced by a header with its bytes and its number of patches.

With the transport `folder`, each trainer rank writes its messages to a file for each engine rank that it has
elements for, in a folder of the sync. All replicas read the same files: each engine rank those of its number.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megarl.machine.usage import PeakMemory
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.patch import (
    AcknowledgedWeights,
    most_message_bytes,
    patch_chunks,
    read_message,
)
from megarl.weights.tensors import PeerTransfers, ScheduleKey, WeightTransferError
from megarl.weights.transfer import Channel, Transfer
from megarl.weights.transports.interface import DestinationViews, EngineLink, Sender, SendingRank, SentShards

_HEADER_BYTES = 16
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the message that follows in a file


def patch_file(folder: Path, source: int, target: int) -> Path:
    """Return the file that a trainer rank writes for an engine rank."""
    return folder / f"{source}-to-{target}.patches"


class PatchFiles(P2PGroup):
    """A group whose messages wait in files until they are received. Each follows its checksum.

    Args:
        folder: The folder of one sync, empty before it.
        rank: The trainer rank that sends, or the engine rank that receives.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._num_read: Counter[int] = Counter()  # bytes, by sender

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> PendingMessages:
        for target, tensor in sends:
            content = tensor.cpu().numpy()
            path = patch_file(self._folder, self._rank, target)
            try:
                with path.open("ab") as file:
                    file.write(_CHECKSUM.pack(zlib.crc32(content)))
                    file.write(content)
            except OSError as error:  # often without the name of the file
                raise OSError(error.errno, error.strerror, str(path)) from None

        for source, tensor in receives:
            received = torch.frombuffer(self._read(source, tensor.nbytes), dtype=torch.uint8)
            tensor.view(torch.uint8).copy_(received)

        return lambda patience_s: True  # they are in the files

    def _read(self, source: int, num_bytes: int) -> bytearray:
        path = patch_file(self._folder, source, self._rank)
        content = bytearray(num_bytes)
        try:
            with path.open("rb") as file:
                file.seek(self._num_read[source])
                checksum = file.read(_CHECKSUM.size)
                is_whole = file.readinto(content) == num_bytes
                self._num_read[source] = file.tell()
        except OSError as error:
            raise WeightTransferError(f"{path}: cannot be read: {error.strerror}") from error

        if not is_whole or checksum != _CHECKSUM.pack(zlib.crc32(content)):
            raise WeightTransferError(
                f"{path}: is damaged before byte {self._num_read[source]:,}: its checksum differs"
            )
        return content

    def check_end(self, source: int, num_chunks: int) -> None:
        """Check that a file, whose patches describe all chunks, has nothing else."""
        path = patch_file(self._folder, source, self._rank)
        if path.stat().st_size > self._num_read[source]:
            raise WeightTransferError(f"{path}: has more than the patches of {num_chunks} chunks")


class DeltaSender(Sender):
    """Sends patches to replicas that acknowledged earlier weights, and everything to others.

    Equal schedules share their acknowledged weights.
    """

    def __init__(self, own: SendingRank) -> None:
        super().__init__(own)
        self._keys: dict[int, dict[int, ScheduleKey]] = {}  # by replica and peer
        self._acknowledged: dict[ScheduleKey, AcknowledgedWeights] = {}

    def join(self, replica: int, link: EngineLink) -> None:
        super().join(replica, link)
        schedules = link.peers.schedules
        self._keys[replica] = {peer: schedule.key for peer, schedule in schedules.items()}
        for schedule in schedules.values():
            if schedule.key not in self._acknowledged:
                self._acknowledged[schedule.key] = AcknowledgedWeights(schedule, link.dtype)

    def forget_weights(self, replica: int) -> None:
        for key in self._keys.get(replica, {}).values():
            self._acknowledged[key].forget(replica)

    def open(
        self,
        shards: SentShards,
        replicas: Collection[int],
        first_round: int = 0,
        folder: Path | None = None,
    ) -> Transfer:
        assert first_round == 0, "patches are for models that change as a whole"
        peak = PeakMemory(shards.device)
        users: dict[ScheduleKey, list[int]] = {}
        for replica in sorted(self._keys.keys() & set(replicas)):
            for key in self._keys[replica].values():
                users.setdefault(key, []).append(replica)

        sent = {key: self._acknowledged[key] for key in users}
        for key, weights in sent.items():
            weights.begin(users[key])
            if not weights.buffers.numel():
                weights.buffers = torch.empty(2, weights.capacity, dtype=torch.uint8, device=shards.device)

        # Every replica reads the same files, so they are written for one.
        channels = self._channels
        if folder is not None:
            first = min(replicas)
            channels = {first: Channel(PatchFiles(folder, self._own.rank), PeerTransfers(), replica=first)}
        peers = {
            channel: {peer: sent[key] for peer, key in self._keys[replica].items()}
            for replica, channel in sorted(channels.items())
            if replica in replicas
        }
        return _PatchSends(peers, list(sent.values()), shards, peak, through_files=folder is not None)

    def leave(self, replica: int) -> None:
        self.forget_weights(replica)
        self._keys.pop(replica, None)

        # The copies that no replica needs any more.
        needed = {key for keys in self._keys.values() for key in keys.values()}
        for key in self._acknowledged.keys() - needed:
            del self._acknowledged[key]
        super().leave(replica)

    def release(self) -> None:
        super().release()
        for weights in self._acknowledged.values():
            weights.free_buffers()

    def close(self) -> None:
        super().close()
        self._keys = {}
        self._acknowledged = {}


class _PatchSends(Transfer):
    """Sends what changed to the peers. One message is made while the previous one travels.

    Args:
        peers: By channel, the weights that each peer gets.
        sent: All of these weights.
        shards: The current weights.
    """

    def __init__(
        self,
        peers: Mapping[Channel, Mapping[int, AcknowledgedWeights]],
        sent: list[AcknowledgedWeights],
        shards: SentShards,
        peak: PeakMemory,
        through_files: bool,
    ) -> None:
        super().__init__(list(peers), shards.device, peak=peak)
        self._through_files = through_files
        self._peers = peers
        self._sent = sent
        self._shards = shards
        self.planned_bytes = sum(weights.num_bytes for own in peers.values() for weights in own.values())
        self.buffer_bytes = sum(weights.buffers.nbytes for weights in sent)

    def _work(self) -> Iterator[None]:
        number = 0
        while unfinished := [weights for weights in self._sent if not weights.is_complete]:
            # There are two buffers, so the message before the previous one must have arrived.
            yield from self._arrival(number - 2)
            self._send({weights: self._message(weights, number) for weights in unfinished}, number)
            number += 1

        yield from self._arrival(number - 2)
        yield from self._arrival(number - 1)
        for weights in self._sent:
            weights.end([replica for replica in weights.replicas if replica not in self.lost])

    def close(self) -> None:
        super().close()
        if self._through_files:  # as with whole folders, buffers exist only during a sync
            for weights in self._sent:
                weights.free_buffers()

    def _message(self, weights: AcknowledgedWeights, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the header and the data of the next message."""
        with self.packing:
            data, num_patches = weights.next_message(
                weights.buffers[number % 2], self._shards.regions, self._shards.are_computed
            )
        return torch.tensor([len(data), num_patches], device=data.device), data

    def _send(
        self, messages: Mapping[AcknowledgedWeights, tuple[torch.Tensor, torch.Tensor]], number: int
    ) -> None:
        for channel, peers in self._peers.items():
            if self._is_lost(channel):
                continue
            sends = [
                (peer, tensor) for peer, weights in peers.items() for tensor in messages.get(weights, ())
            ]
            if sends:
                self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
                self._exchange(channel, sends, [], number)


# trainer rank, flat bytes, number of patches, and the first chunk
_Arrived = tuple[int, torch.Tensor, int, int]


class PatchReceives(Transfer):
    """Receives the messages of one pass. A message is applied while the next one travels.

    Args:
        p2p: The group with the senders.
        device: The device of the model.
        message_device: The device of the messages. Those in files wait on the host, since the device of the
            model has no room for their buffers.
    """

    def __init__(
        self,
        p2p: P2PGroup,
        destinations: DestinationViews,
        device: torch.device,
        message_device: torch.device,
    ) -> None:
        self._channel = Channel(p2p, PeerTransfers())
        super().__init__([self._channel], device, yields_regularly=True)
        self._destinations = destinations
        self._device = device
        self._message_device = message_device
        self._schedules = destinations.sources.schedules
        self._chunks = {rank: patch_chunks(schedule) for rank, schedule in self._schedules.items()}

    def _work(self) -> Iterator[None]:
        next_chunks = dict.fromkeys(self._chunks, 0)
        arrived: list[_Arrived] = []
        number = 0

        while left := [rank for rank, each in self._chunks.items() if next_chunks[rank] < each.num_rounds]:
            if not self._has_time:
                yield
            # Messages in files can wait, so only those of one trainer rank are in memory.
            ranks = left[:1] if isinstance(self._channel.p2p, PatchFiles) else left
            # The headers first, because messages can only be received in their exact size.
            headers = torch.empty(len(ranks), 2, dtype=torch.int64, device=self._message_device)
            self._exchange(self._channel, [], list(zip(ranks, headers, strict=True)), number)
            yield from self._arrival(number)
            messages = [
                (rank, self._buffer(rank, num_bytes, num_patches), num_patches, next_chunks[rank])
                for rank, (num_bytes, num_patches) in zip(ranks, headers.tolist(), strict=True)
            ]
            self._exchange(self._channel, [], [(rank, data) for rank, data, *_ in messages], number)
            for rank, _, num_patches, _ in messages:
                next_chunks[rank] += num_patches
            # Apply the previous messages while these arrive.
            self._apply(arrived)
            yield from self._arrival(number)
            arrived = messages
            number += 1

        self._apply(arrived)
        if isinstance(self._channel.p2p, PatchFiles):
            for rank, chunks in self._chunks.items():
                self._channel.p2p.check_end(rank, chunks.num_rounds)
        self._destinations.is_whole = True

    def _buffer(self, rank: int, num_bytes: int, num_patches: int) -> torch.Tensor:
        """Return memory for a message that was announced."""
        most = most_message_bytes(self._schedules[rank], self._destinations.dtype.itemsize)
        if not 0 < num_bytes <= most or num_patches <= 0:
            raise WeightTransferError(
                f"trainer rank {rank} announced a message of {num_bytes} bytes with {num_patches} patches, "
                f"but the buffer has {most} bytes"
            )
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._message_device)

    def _apply(self, arrived: Sequence[_Arrived]) -> None:
        destinations = self._destinations
        with self.packing:
            for rank, data, num_patches, first in arrived:
                message = data.to(self._device), num_patches
                chunks = self._chunks[rank]
                for chunk, change in read_message(message, chunks, first, destinations.dtype):
                    destinations.apply(chunks.message(chunk), change)
                destinations.received_bytes += data.nbytes + _HEADER_BYTES
        if self._device.type == "cuda":
            # The next message arrives on another CUDA stream.
            torch.cuda.current_stream(self._device).synchronize()
