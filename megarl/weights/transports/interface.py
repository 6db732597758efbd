"""The interface of a transport, which is one module of this package with the name of its `Transport`.

    driver                         trainer ranks             engine ranks
    route, a pure function
      links of the listeners -->   Sender.listen
      their addresses        -->   Sender.join               a new Receiver
    in each pass             -->   Sender.open               Receiver.open

Both sides run the `Transfer` of a pass until it is complete. A pass consists of rounds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.config.schema import Transport
from megarl.machine.errors import counted
from megarl.machine.usage import PeakMemory
from megarl.weights.block_scaling import QuantizedShards
from megarl.weights.message_words import Places, WordCounts, places_in_words, slices_in_words
from megarl.weights.p2p import P2PGroup
from megarl.weights.patch import Change, apply_change
from megarl.weights.plan import TensorSlices, TransferPlan
from megarl.weights.shards import Shards
from megarl.weights.tensors import (
    Part,
    PeerTransfers,
    TensorSlice,
    TransferSchedule,
    WeightTransferError,
    tiling_fault,
)
from megarl.weights.transfer import Channel, PipelinedTransfer, Transfer, copy_tensors

_MAX_NAMED = 8

SentShards = Shards | QuantizedShards
Address = tuple[Any, ...]  # JSON values, which only the transport reads


@dataclass(frozen=True)
class EngineLink:
    """How one rank, of the trainers or of an engine, takes part in the weight syncs of one engine.

    It is sent as JSON to the ranks of engines in other processes than their worker.

    Attributes:
        name: The name of the connection in error messages.
        dtype: The dtype of the messages.
        limit_s: The time limit for all ranks to join, and for each message.
        sends_changes: Whether only what changed since the engine's last weights is sent.
        peers: What the rank sends or receives, by the numbers of its peers.
        rank: The number of the rank, as its transport counts: in the group, or within the engine.
        size: The number of all ranks of a group, for its listener.
        device: The name of an engine rank's device in the plan, if its transport shares devices.
        addresses: What the listeners have published, in their order.
        words: The numbers of words of tensors with a wider dtype (see message_words.py).
    """

    transport: Transport
    name: str
    dtype: torch.dtype
    limit_s: float
    sends_changes: bool = False
    peers: PeerTransfers = field(default_factory=PeerTransfers)
    rank: int = 0
    size: int = 0
    device: str = ""
    addresses: Sequence[Address] = ()
    words: WordCounts = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        peers = [
            (
                peer,
                [(name, encode_slice(tensor_slice)) for name, tensor_slice in schedule.parts],
                schedule.bounds,
            )
            for peer, schedule in self.peers.schedules.items()
        ]
        return {**vars(self), "peers": peers, "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def decode(cls, encoded: Mapping[str, Any]) -> EngineLink:
        schedules = {
            peer: TransferSchedule(
                [Part(name, decode_slice(corners)) for name, corners in parts], bounds=bounds
            )
            for peer, parts, bounds in encoded["peers"]
        }
        fields: dict[str, Any] = {
            **encoded,
            "transport": Transport(encoded["transport"]),
            "peers": PeerTransfers(schedules),
            "dtype": getattr(torch, encoded["dtype"]),
        }
        return cls(**fields)


def encode_slice(tensor_slice: TensorSlice) -> list[list[int]]:
    return [list(tensor_slice.starts), list(tensor_slice.stops)]


def decode_slice(corners: Sequence[Sequence[int]]) -> TensorSlice:
    starts, stops = corners
    return TensorSlice(tuple(starts), tuple(stops))


class SendingRank(NamedTuple):
    """A trainer rank.

    Attributes:
        node: The address of its node.
        backend: A key of `p2p.BACKENDS`.
        device: The device of its weights.
        trainers: Returns the group of all trainer ranks. All of them make the first call together.
    """

    rank: int
    node: str
    backend: str
    device: torch.device
    trainers: Callable[[], P2PGroup]


class Sender:
    """The trainer-rank side of a transport, for all replicas (by number) that the rank sends to.

    This base class sends all weights in messages of planned sizes through the channels that `join` has made.
    Two messages are packed into buffers that are kept between passes, because allocating them takes longer
    than packing a message.
    """

    def __init__(self, own: SendingRank) -> None:
        self._own = own
        self._buffers = torch.empty(2, 0)
        self._channels: dict[int, Channel] = {}

    def listen(self, replica: int, link: EngineLink) -> Address:
        """Prepare for a replica, and return the address that the other ranks need to join."""
        raise NotImplementedError

    def join(self, replica: int, link: EngineLink) -> None:
        """Connect to a replica. A restarted one has the number of the old one, which is forgotten."""
        self.leave(replica)

    def open(
        self,
        shards: SentShards,
        replicas: Collection[int],
        first_round: int = 0,
        folder: Path | None = None,
    ) -> Transfer:
        """Start a pass that sends the current weights to these replicas.

        Args:
            first_round: The round to start with.
            folder: An empty folder for the pass, if it goes through files.
        """
        peak = PeakMemory(shards.device)
        channels = [
            channel._replace(sends=channel.sends.after(first_round))
            for replica, channel in sorted(self._channels.items())
            if replica in replicas
        ]
        num_rounds = max((channel.sends.num_rounds for channel in channels), default=0)

        # Messages of a round to all replicas share one pack buffer.
        largest = max(
            (sum(channel.sends.length(number) for channel in channels) for number in range(num_rounds)),
            default=0,
        )
        buffers = self._pack_buffers(largest, shards)
        return PipelinedTransfer(
            channels, buffers, shards.regions, are_computed=shards.are_computed, peak=peak
        )

    def forget_weights(self, replica: int) -> None:
        """Send everything to the replica the next time, since it no longer has what it acknowledged."""

    def leave(self, replica: int) -> None:
        """Forget a replica, even in the middle of a pass. Does nothing if it is unknown."""
        # Abort instead of closing, since messages to the replica may still be in flight.
        if (channel := self._channels.pop(replica, None)) is not None:
            channel.p2p.abort()

    def close(self) -> None:
        """Release everything."""
        self.release()
        for channel in self._channels.values():
            channel.p2p.close()
        self._channels = {}

    def release(self) -> None:
        """Release memory between two passes."""
        self._buffers = torch.empty(2, 0)

    def _pack_buffers(self, numel: int, shards: SentShards) -> torch.Tensor:
        """Return buffers of shape (2, numel)."""
        dtype, device = shards.dtype, shards.device
        if self._buffers.shape[1] != numel or self._buffers.dtype != dtype or self._buffers.device != device:
            self._buffers = torch.empty(2, 0)  # freed before the new ones are allocated
            self._buffers = torch.empty(2, numel, dtype=dtype, device=device)
        return self._buffers


class Receiver(ABC):
    """The engine-rank side of a transport: a connection with the trainers, from a link with their addresses.

    Raises:
        WeightTransferError: The trainers cannot be reached.
    """

    def __init__(self, link: EngineLink, device: torch.device) -> None:
        self._link = link
        self._device = device

    @abstractmethod
    def open(self, destinations: DestinationViews, folder: str | None) -> Transfer:
        """Start a pass. With files, `folder` has those of this pass."""

    @abstractmethod
    def close(self, in_pass: bool) -> None:
        """Disconnect, even in the middle of a pass."""


class Routes(NamedTuple):
    """The links of one engine, each of which also gets the addresses of the listeners.

    Attributes:
        listeners: By trainer rank, those that publish an address, before anyone joins.
        senders: By trainer rank, those that join.
        receivers: By engine rank.
    """

    listeners: Mapping[int, EngineLink]
    senders: Mapping[int, EngineLink]
    receivers: Sequence[EngineLink]


class TransportSides(NamedTuple):
    """A transport.

    Attributes:
        route: Makes the links of one engine, from the whole plan, the device of each trainer rank, the device
            of each rank of the engine by its number in the plan, and a link with what all of them share.
        sender: Makes the side of a trainer rank, which serves all engines with such links.
        receiver: Makes the side of an engine rank on its device.
    """

    route: Callable[[TransferPlan, Sequence[str], Mapping[int, str], EngineLink], Routes]
    sender: Callable[[EngineLink, SendingRank], Sender]
    receiver: Callable[[EngineLink, torch.device], Receiver]


def sides_of(transport: Transport) -> TransportSides:
    return import_module(f"megarl.weights.transports.{transport.value}").SIDES


class DestinationViews:
    """The views of a model's parameters that received parts are copied to.

    Args:
        sources: The schedules by the senders' ranks.
        needed: The slices that the model needs.
        dtype: The dtype of the messages.
        places: Finds the views of a part. It is called once per part, and again after `forget`, which must be
            called when the model has moved.

    Attributes:
        is_whole: Whether the memory contains all of the last weights that were received as patches.

    Raises:
        WeightTransferError: The schedules do not deliver each element of `needed` exactly once.
    """

    def __init__(
        self,
        sources: PeerTransfers,
        needed: Mapping[str, Sequence[TensorSlice]],
        dtype: torch.dtype,
        places: Places,
    ) -> None:
        _check(sources, needed)
        self._all = sources
        self.sources = sources
        self.dtype = dtype
        self.places_of = places

        # The cache must not contain views of a receive buffer: they would keep the buffer alive.
        self._targets: dict[Part, list[torch.Tensor]] = {}
        self.is_whole = False
        self.received_bytes = 0

    def begin(self, first_round: int) -> None:
        """Expect the rounds from `first_round` on in the next pass."""
        self.sources = self._all.after(first_round)

    def place(self, part: Part) -> torch.Tensor | None:
        """Return the flat memory of a part if the model stores it contiguously and in one place only."""
        targets = self._targets_of(part)

        # Parts of another dtype, or in several places, have to be copied out of the buffer.
        if len(targets) == 1 and targets[0].is_contiguous() and targets[0].dtype == self.dtype:
            return targets[0].view(-1)
        return None

    def unpack(self, number: int, buffer: torch.Tensor, placed: Collection[Part] = ()) -> None:
        """Copy a round out of its flat buffer, except for the parts that were received directly."""
        targets = []
        sources = []
        for part, elements in self.sources.parts(number, buffer):
            if part not in placed:
                for target in self._targets_of(part):
                    targets.append(target)
                    sources.append(elements)

        copy_tensors(targets, sources)
        self.received_bytes += self.sources.length(number) * self.dtype.itemsize

    def apply(self, parts: Sequence[Part], change: Change | None) -> None:
        """Write what changed in a chunk, which consists of `parts`, to the model.

        Raises:
            WeightTransferError: The model does not have the elements that did not change.
        """
        if not self.is_whole and (change is None or change[0] is not None):
            raise WeightTransferError(
                "only what changed since the last weights was sent, but the engine's parameters no longer "
                "have them: restart the engine"
            )
        if change is not None:
            apply_change(change, [(part.tensor_slice.volume, self._targets_of(part)) for part in parts])

    def _targets_of(self, part: Part) -> list[torch.Tensor]:
        if part not in self._targets:
            self._targets[part] = list(self.places_of(part))
        return self._targets[part]

    def forget(self) -> None:
        self._targets = {}
        self.is_whole = False


class WeightReceiver:
    """Receives the weights of one engine rank. `received_bytes` counts from the last `join`.

    receiver.join(link, needed, places)      # once
    receiver.begin()                         # in each update
    while not receiver.receive():
        ...                                  # look for something else to do
    receiver.leave()
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._connection: Receiver | None = None
        self._destinations: DestinationViews | None = None
        self._transfer: Transfer | None = None  # of the update that is under way

    def join(self, link: EngineLink, needed: TensorSlices, places: Places) -> None:
        """Connect to the trainers, replacing the previous connection.

        Raises:
            WeightTransferError: The trainers cannot be reached, or would not send each element of `needed`
                exactly once.
        """
        self.leave()
        self._destinations = DestinationViews(
            link.peers,
            slices_in_words(needed, link.words),
            link.dtype,
            places_in_words(places, link.words, link.dtype),
        )
        self._connection = sides_of(link.transport).receiver(link, self._device)

    def begin(self, has_moved: bool = False, first_round: int = 0, folder: str | None = None) -> None:
        """Prepare for the first `receive` of an update.

        Args:
            has_moved: Whether the addresses of the model's parameters have changed.
            first_round: The first round that is sent. The engine has the tensors of earlier ones.
            folder: The folder with the files of the update, if the transport is a folder with patches.

        Raises:
            WeightTransferError: No trainer was joined, or the previous update was aborted halfway.
        """
        if self._connection is None or self._destinations is None:
            raise WeightTransferError("the engine has joined no trainer")
        if self._transfer is not None:
            raise WeightTransferError(
                "the previous weight update was aborted halfway: join the trainers again"
            )

        if has_moved:
            self._destinations.forget()
        self._destinations.begin(first_round)
        self._transfer = self._connection.open(self._destinations, folder)

    def receive(self) -> bool:
        """Return whether everything has arrived. After False, call the method again to continue."""
        assert self._transfer is not None
        if not self._transfer.run():
            return False
        self._transfer = None
        return True

    @property
    def received_bytes(self) -> int:
        return 0 if self._destinations is None else self._destinations.received_bytes

    def leave(self) -> None:
        """Disconnect from the trainers, even if a pass is under way."""
        if self._connection is not None:
            self._connection.close(in_pass=self._transfer is not None)
        self._connection = self._destinations = self._transfer = None


def _check(sources: PeerTransfers, needed: Mapping[str, Sequence[TensorSlice]]) -> None:
    """Check that the rounds deliver each needed element exactly once."""
    coming: dict[str, list[TensorSlice]] = defaultdict(list)
    for schedule in sources.schedules.values():
        for name, tensor_slice in schedule.parts:
            coming[name].append(tensor_slice)

    faults = [f"{name} is not needed here" for name in coming.keys() - needed.keys()]
    for name, slices in needed.items():
        for tensor_slice in slices:
            # The arriving parts must tile the slice that is needed.
            inside = [
                shared
                for part in coming.get(name, ())
                if (shared := part.intersect(tensor_slice)) is not None
            ]
            if (
                fault := tiling_fault(
                    tensor_slice.shape, [part.relative_to(tensor_slice.starts) for part in inside]
                )
            ) is not None:
                faults.append(f"{name} {tensor_slice}: {fault}")

    if faults:
        raise WeightTransferError(
            f"{counted(len(faults), 'tensor')} would not arrive complete: " + "; ".join(faults[:_MAX_NAMED])
        )
