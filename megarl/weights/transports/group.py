"""The transport `group`: point-to-point messages in a process group of one engine and its trainer ranks.

Each engine has a separate group, so that replacing one does not make the others meet again.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megarl.weights.p2p import P2PAddress, P2PGroup, reserve_port
from megarl.weights.plan import TransferPlan
from megarl.weights.tensors import Part, PeerTransfers
from megarl.weights.transfer import Channel, PipelinedTransfer, ReceiveBuffer, Transfer
from megarl.weights.transports.delta import DeltaSender, PatchReceives
from megarl.weights.transports.interface import (
    Address,
    DestinationViews,
    EngineLink,
    Receiver,
    Routes,
    Sender,
    SendingRank,
    TransportSides,
)


def _route(
    plan: TransferPlan, trainer_devices: Sequence[str], targets: Mapping[int, str], link: EngineLink
) -> Routes:
    """Return the links of one engine's group, in which the senders come first.

    The first sender reserves the port where all members meet.
    """
    sources = sorted({source for source, target in plan.schedules if target in targets})
    numbers = {source: number for number, source in enumerate(sources)}
    size = len(sources) + len(targets)

    senders: dict[int, EngineLink] = {}
    for source, number in numbers.items():
        schedules = {
            len(sources) + rank: plan.schedules[source, target]
            for rank, target in enumerate(targets)
            if (source, target) in plan.schedules
        }
        senders[source] = replace(link, peers=PeerTransfers(schedules), rank=number)

    receivers: list[EngineLink] = []
    for number, target in enumerate(targets, start=len(sources)):
        schedules = plan.of_target(target).schedules
        peers = PeerTransfers({numbers[source]: schedule for source, schedule in schedules.items()})
        receivers.append(replace(link, peers=peers, rank=number))

    return Routes({sources[0]: replace(link, size=size)}, senders, receivers)


class GroupSender(Sender):
    def __init__(self, own: SendingRank) -> None:
        super().__init__(own)
        self._listener: socket.socket | None = None

    def listen(self, replica: int, link: EngineLink) -> Address:
        """Reserve an address at which this rank will be rank 0 of the next group."""
        # An unused reservation remains if joining failed before.
        if self._listener is not None:
            self._listener.close()
        self._listener = reserve_port(self._own.node)
        port = self._listener.getsockname()[1]
        return P2PAddress(link.name, self._own.node, port, link.size, self._own.backend, link.limit_s)

    def join(self, replica: int, link: EngineLink) -> None:
        """Join the group of a replica, and return when all members have joined."""
        super().join(replica, link)
        listener = None
        # The group takes over the listener, and owns the port from now on.
        if link.rank == 0:
            listener = self._listener
            self._listener = None
        p2p = P2PGroup.join(P2PAddress(*link.addresses[0]), link.rank, self._own.device, listener)
        self._channels[replica] = Channel(p2p, link.peers, replica=replica)

    def close(self) -> None:
        super().close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class GroupDeltaSender(DeltaSender, GroupSender):
    """Sends patches in the groups."""


def _sender(link: EngineLink, own: SendingRank) -> Sender:
    return GroupDeltaSender(own) if link.sends_changes else GroupSender(own)


class _GroupReceiver(Receiver):
    def __init__(self, link: EngineLink, device: torch.device) -> None:
        super().__init__(link, device)
        self._p2p = P2PGroup.join(P2PAddress(*link.addresses[0]), link.rank, device)

    def open(self, destinations: DestinationViews, folder: str | None) -> Transfer:
        if self._link.sends_changes:
            return PatchReceives(self._p2p, destinations, self._device, self._device)
        # An engine rank sends nothing, so there is nothing to pack.
        nothing = torch.empty(2, 0, device=self._device)
        channel = Channel(self._p2p, PeerTransfers(), receives=True)
        receive_buffer = _GroupReceiveBuffer(destinations, self._device)
        return PipelinedTransfer([channel], nothing, receive_buffer=receive_buffer, yields_regularly=True)

    def close(self, in_pass: bool) -> None:
        if in_pass:
            self._p2p.abort()  # messages may be in flight
        else:
            self._p2p.close()


class _GroupReceiveBuffer(ReceiveBuffer):
    """The receive buffer of one pass. It has room for two rounds."""

    def __init__(self, destinations: DestinationViews, device: torch.device) -> None:
        self.sources = destinations.sources
        self._destinations = destinations
        self._round_buffers = torch.empty(
            2, destinations.sources.largest, dtype=destinations.dtype, device=device
        )
        self.nbytes = self._round_buffers.nbytes

        # The parts of the round in each buffer that are received directly into parameters.
        self._placed: tuple[set[Part], set[Part]] = set(), set()

    def is_free(self, number: int) -> bool:
        return True

    def buffer(self, number: int) -> torch.Tensor:
        return self._round_buffers[number % 2]

    def place(self, number: int, part: Part) -> torch.Tensor | None:
        place = self._destinations.place(part)
        if place is not None:
            self._placed[number % 2].add(part)
        return place

    def deliver(self, number: int) -> None:
        self._destinations.unpack(number, self.buffer(number), self._placed[number % 2])
        self._placed[number % 2].clear()
        if self._round_buffers.is_cuda:
            # The next round arrives on another CUDA stream.
            torch.cuda.current_stream(self._round_buffers.device).synchronize()


SIDES = TransportSides(_route, _sender, _GroupReceiver)
