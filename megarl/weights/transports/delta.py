"""The transport `group` with patches: only what changed since an engine's last weights is sent.

The messages have no planned size. Each is announced by a header with its bytes and its number of patches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from megarl.weights.acknowledged import (
    AcknowledgedWeights,
    PatchMessage,
    most_message_bytes,
    patch_chunks,
    read_message,
)
from megarl.weights.p2p import P2PGroup
from megarl.weights.schedule import PeerTransfers, ScheduleKey, TransferSchedule
from megarl.weights.tensors import WeightTransferError
from megarl.weights.transfer import Channel, Transfer
from megarl.weights.transports.group import GroupReceiver, GroupSender
from megarl.weights.transports.interface import DestinationViews, SentShards

_HEADER_BYTES = 16


class PatchStreams:
    """Streams of patches from one rank to each replica. Equal schedules share their acknowledged weights."""

    def __init__(self) -> None:
        self.schedules: dict[int, dict[int, ScheduleKey]] = {}  # by replica and peer
        self._acknowledged: dict[ScheduleKey, AcknowledgedWeights] = {}

    def join(self, replica: int, schedules: Mapping[int, TransferSchedule], dtype: torch.dtype) -> None:
        self.schedules[replica] = {peer: schedule.key for peer, schedule in schedules.items()}
        for schedule in schedules.values():
            if schedule.key not in self._acknowledged:
                self._acknowledged[schedule.key] = AcknowledgedWeights(schedule, dtype)

    def begin(
        self, replicas: Collection[int], device: torch.device
    ) -> dict[ScheduleKey, AcknowledgedWeights]:
        """Begin a pass to these replicas, and return the weights that it sends."""
        users: dict[ScheduleKey, list[int]] = {}
        for replica in sorted(self.schedules.keys() & set(replicas)):
            for key in self.schedules[replica].values():
                users.setdefault(key, []).append(replica)

        begun = {key: self._acknowledged[key] for key in users}
        for key, weights in begun.items():
            weights.begin(users[key])
            if not weights.buffers.numel():
                weights.buffers = torch.empty(2, weights.capacity, dtype=torch.uint8, device=device)
        return begun

    def forget(self, replica: int) -> None:
        """Send everything to the replica the next time, since it no longer has what it acknowledged."""
        for key in self.schedules.get(replica, {}).values():
            self._acknowledged[key].forget(replica)

    def leave(self, replica: int) -> None:
        self.forget(replica)
        self.schedules.pop(replica, None)

        # The copies that no replica needs any more.
        needed = {key for schedules in self.schedules.values() for key in schedules.values()}
        for key in self._acknowledged.keys() - needed:
            del self._acknowledged[key]

    def release(self) -> None:
        for weights in self._acknowledged.values():
            weights.buffers = weights.buffers.new_empty(2, 0)

    def close(self) -> None:
        self.schedules = {}
        self._acknowledged = {}


class DeltaSender(GroupSender):
    """Sends patches to replicas that acknowledged earlier weights, and everything to others.

    Args:
        dtype: The dtype of the weights that are sent.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._streams = PatchStreams()

    def join(self, replica: int, p2p: P2PGroup, schedules: Mapping[int, TransferSchedule]) -> None:
        super().join(replica, p2p, schedules)
        self._streams.join(replica, schedules, self._dtype)

    def forget_weights(self, replica: int) -> None:
        """Send everything to the replica the next time, since it no longer has what it acknowledged."""
        self._streams.forget(replica)

    def _new_transfer(self, shards: SentShards, replicas: Collection[int], first_round: int) -> Transfer:
        assert first_round == 0, "patches are for models that change as a whole"
        channels = [channel for replica, channel in sorted(self._channels.items()) if replica in replicas]
        sent = self._streams.begin(replicas, shards.device)
        peers = {
            channel: {peer: sent[key] for peer, key in self._streams.schedules[channel.replica].items()}
            for channel in channels
            if channel.replica is not None
        }
        return _PatchSends(peers, list(sent.values()), shards)

    def leave(self, replica: int) -> None:
        self._streams.leave(replica)
        super().leave(replica)

    def release(self) -> None:
        super().release()
        self._streams.release()

    def close(self) -> None:
        super().close()
        self._streams.close()


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
    ) -> None:
        super().__init__(list(peers), shards.device)
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


class DeltaReceiver(GroupReceiver):
    def _new_transfer(self, destinations: DestinationViews) -> Transfer:
        return _PatchReceives(Channel(self._p2p, PeerTransfers({})), destinations, self._device)


class _Source:
    """A trainer rank that sends to this engine rank, and how far it is."""

    def __init__(
        self, rank: int, schedule: TransferSchedule, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rank = rank
        self.chunks = patch_chunks(schedule)
        self.next_chunk = 0
        self.buffers = torch.empty(
            2, most_message_bytes(schedule, dtype.itemsize), dtype=torch.uint8, device=device
        )

    @property
    def has_more(self) -> bool:
        return self.next_chunk < self.chunks.num_rounds


class _PatchReceives(Transfer):
    """Receives the messages of one pass. A message is applied while the next one travels."""

    def __init__(self, channel: Channel, destinations: DestinationViews, device: torch.device) -> None:
        super().__init__([channel], device, yields_regularly=True)
        self._channel = channel
        self._destinations = destinations
        self._device = device
        self._sources = [
            _Source(rank, schedule, destinations.dtype, device)
            for rank, schedule in destinations.sources.schedules.items()
        ]

    def _work(self) -> Iterator[None]:
        arrived: list[tuple[_Source, PatchMessage, int]] = []
        number = 0

        while sources := [source for source in self._sources if source.has_more]:
            if not self._has_time:
                yield
            # The headers first, because messages can only be received in their exact size.
            ranks = [source.rank for source in sources]
            headers = torch.empty(len(sources), 2, dtype=torch.int64, device=self._device)
            self._receive(list(zip(ranks, headers, strict=True)), number)
            yield from self._arrival(number)
            messages = [
                (source, self._message(source, number, *header), source.next_chunk)
                for source, header in zip(sources, headers.tolist(), strict=True)
            ]
            self._receive([(source.rank, message.data) for source, message, _ in messages], number)
            for source, message, _ in messages:
                source.next_chunk += message.num_patches
            # Apply the previous messages while these arrive.
            self._apply(arrived)
            yield from self._arrival(number)
            arrived = messages
            number += 1

        self._apply(arrived)
        self._destinations.is_whole = True

    def _receive(self, receives: list[tuple[int, torch.Tensor]], number: int) -> None:
        self._exchange(self._channel, [], receives, number)

    def _message(self, source: _Source, number: int, num_bytes: int, num_patches: int) -> PatchMessage:
        buffer = source.buffers[number % 2]
        if not 0 < num_bytes <= len(buffer) or num_patches <= 0:
            raise WeightTransferError(
                f"trainer rank {source.rank} announced a message of {num_bytes} bytes with {num_patches} "
                f"patches, but the buffer has {len(buffer)} bytes"
            )
        return PatchMessage(buffer[:num_bytes], num_patches)

    def _apply(self, arrived: list[tuple[_Source, PatchMessage, int]]) -> None:
        destinations = self._destinations
        with self.packing:
            for source, message, first in arrived:
                for chunk, change in read_message(message, source.chunks, first, destinations.dtype):
                    destinations.apply(source.chunks.message(chunk), change)
                destinations.received_bytes += message.data.nbytes + _HEADER_BYTES
        if self._device.type == "cuda":
            # The next message arrives on another CUDA stream.
            torch.cuda.current_stream(self._device).synchronize()
