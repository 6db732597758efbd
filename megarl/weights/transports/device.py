"""The transport `device`: a trainer rank and the engine rank on the same device share IPC buffers.

What an engine rank needs from other devices is first sent to the trainer rank on its device, within the
trainers' own process group, directly into the buffers. No process has to see another device, and on any
number of nodes each pair is on one node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megarl.machine.usage import PeakMemory
from megarl.weights.ipc import IPCAddress, IPCReader, IPCWriter
from megarl.weights.plan import NUM_IPC_BUFFERS, TransferPlan
from megarl.weights.tensors import PeerTransfers, TransferSchedule
from megarl.weights.transfer import PATIENCE_S, Channel, PipelinedTransfer, ReceiveBuffer, Transfer
from megarl.weights.transports.interface import (
    Address,
    DestinationViews,
    EngineLink,
    Receiver,
    Routes,
    Sender,
    SendingRank,
    SentShards,
    TransportSides,
)


def _route(
    plan: TransferPlan, trainer_devices: Sequence[str], targets: Mapping[int, str], link: EngineLink
) -> Routes:
    """Return the links of one engine. The trainer rank on the device of each engine rank serves it.

    Raises:
        ValueError: A device has no trainer rank.
    """
    served: dict[int, EngineLink] = {}
    relays: dict[int, dict[int, TransferSchedule]] = {}

    for number, (target, device) in enumerate(targets.items()):
        if device not in trainer_devices:
            raise ValueError(
                f"an engine rank works on device {device}, where there is no trainer rank: use "
                f"resharding.transport=group"
            )
        local_trainer = trainer_devices.index(device)
        peers = plan.of_target(target)
        served[local_trainer] = replace(link, peers=peers, rank=number, device=device)
        for source, schedule in peers.schedules.items():
            # Only the trainer rank on the target's device shares memory with it; the others relay through
            # that rank.
            if source != local_trainer:
                relays.setdefault(source, {})[local_trainer] = schedule

    # All trainer ranks create their group together, also those that relay nothing.
    senders = {
        rank: replace(link, peers=PeerTransfers(relays.get(rank, {}))) for rank in range(len(trainer_devices))
    }
    return Routes(served, senders, list(served.values()))


class DeviceSender(Sender):
    """Sends to the engine rank on its own device, and relays to trainer ranks on other devices."""

    def __init__(self, own: SendingRank) -> None:
        super().__init__(own)
        # Keyed by replica, and by the trainer rank on the target's device.
        self._relayed: dict[int, PeerTransfers] = {}
        self._receive_buffer: _DeviceReceiveBuffer | None = None

    def listen(self, replica: int, link: EngineLink) -> Address:
        """Create the IPC buffers for the engine rank of a replica on this device."""
        self._let_go()
        self._receive_buffer = _DeviceReceiveBuffer(replica, link, self._own)
        return self._receive_buffer.ipc.address

    def join(self, replica: int, link: EngineLink) -> None:
        self._own.trainers()
        self._relayed[replica] = link.peers

    def open(
        self,
        shards: SentShards,
        replicas: Collection[int],
        first_round: int = 0,
        folder: Path | None = None,
    ) -> Transfer:
        peak = PeakMemory(shards.device)
        # What this rank relays to trainer ranks on the devices of the engines in this pass.
        sends = PeerTransfers(
            {
                peer: schedule
                for replica in sorted(self._relayed.keys() & set(replicas))
                for peer, schedule in self._relayed[replica].schedules.items()
            }
        ).after(first_round)

        # The engine rank on this device takes part only if its replica does.
        receive_buffer = (
            self._receive_buffer
            if self._receive_buffer is not None and self._receive_buffer.replica in replicas
            else None
        )
        if receive_buffer is not None:
            receive_buffer.begin(first_round)
        buffers = self._pack_buffers(sends.largest, shards)
        channel = Channel(self._own.trainers(), sends, receives=receive_buffer is not None)
        return PipelinedTransfer(
            [channel], buffers, shards.regions, receive_buffer, are_computed=shards.are_computed, peak=peak
        )

    def leave(self, replica: int) -> None:
        self._relayed.pop(replica, None)
        if self._receive_buffer is not None and self._receive_buffer.replica == replica:
            self._let_go()

    def _let_go(self) -> None:
        if self._receive_buffer is not None:
            self._receive_buffer.ipc.close()
            self._receive_buffer = None

    def release(self) -> None:
        super().release()
        if self._receive_buffer is not None:
            self._receive_buffer.ipc.empty()

    def close(self) -> None:
        super().release()
        self._let_go()
        self._relayed = {}


class _DeviceReceiveBuffer(ReceiveBuffer):
    """The IPC buffers of the engine rank on this device."""

    def __init__(self, replica: int, link: EngineLink, own: SendingRank) -> None:
        self.replica = replica
        self._all = link.peers
        self.sources = link.peers
        self.own = own.rank if own.rank in link.peers.schedules else None
        self._dtype = link.dtype
        buffer_bytes = max(1, link.peers.largest) * link.dtype.itemsize
        self.ipc = IPCWriter(buffer_bytes, NUM_IPC_BUFFERS, own.device, link.device)
        self.nbytes = self.ipc.address.nbytes

    def begin(self, first_round: int) -> None:
        """Take the rounds from `first_round` on in the next pass."""
        self.sources = self._all.after(first_round)

    def is_free(self, number: int) -> bool:
        return self.ipc.is_free(number, PATIENCE_S)

    def buffer(self, number: int) -> torch.Tensor:
        return self.ipc.buffer(number, self._dtype)

    def deliver(self, number: int) -> None:
        self.ipc.has_written()

    def is_taken(self) -> bool:
        return self.ipc.is_read(self.sources.num_rounds, PATIENCE_S)


class _DeviceReceiver(Receiver):
    """Reads the IPC buffers on its device. Their address is that of the rank's number within its engine."""

    def __init__(self, link: EngineLink, device: torch.device) -> None:
        super().__init__(link, device)
        self._reader = IPCReader(IPCAddress(*link.addresses[link.rank]), device, link.device)

    def open(self, destinations: DestinationViews, folder: str | None) -> Transfer:
        return _IPCReads(self._reader, destinations, self._device)

    def close(self, in_pass: bool) -> None:
        self._reader.close()


class _IPCReads(Transfer):
    """Copies the rounds of one pass out of the IPC buffers."""

    def __init__(self, reader: IPCReader, destinations: DestinationViews, device: torch.device) -> None:
        super().__init__([], device, yields_regularly=True)
        self._reader = reader
        self._destinations = destinations

    def _work(self) -> Iterator[None]:
        destinations = self._destinations
        num_rounds = destinations.sources.num_rounds
        for number in range(num_rounds):
            if not self._has_time:
                yield
            yield from self._until(partial(self._reader.is_written, number, PATIENCE_S))
            destinations.unpack(number, self._reader.buffer(number, destinations.dtype))
            self._reader.has_read()

        self._reader.end(num_rounds)


SIDES = TransportSides(_route, lambda link, own: DeviceSender(own), _DeviceReceiver)
