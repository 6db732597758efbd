"""The transports `device` and `group`, which send all weights in messages of planned sizes.

`device`: a trainer rank and the engine rank on the same device share IPC buffers. What an engine rank needs
from other devices is first sent to the trainer rank on its device, within the trainers' own process group,
directly into the buffers. No process has to see another device, and on any number of nodes each pair is on
one node.

`group`: point-to-point messages in a process group of one engine and its trainer ranks. Each engine has a
separate group, so that replacing one does not make the others meet again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megarl.machine.usage import PeakMemory
from megarl.weights.ipc import IPCAddress, IPCReader, IPCWriter
from megarl.weights.p2p import P2PGroup
from megarl.weights.plan import NUM_IPC_BUFFERS, TransferPlan
from megarl.weights.tensors import Part, PeerTransfers, TransferSchedule
from megarl.weights.transfer import PATIENCE_S, Channel, PipelinedTransfer, ReceiveBuffer, Transfer
from megarl.weights.transports.interface import DestinationViews, Sender, SentShards

# ---- the transport `device`


def device_transfers(
    plan: TransferPlan, trainer_devices: Sequence[str], targets: Mapping[int, str]
) -> tuple[list[int], dict[int, PeerTransfers]]:
    """Return the trainer rank that serves each rank of one engine, and what others relay to it.

    Args:
        plan: The whole transfer.
        trainer_devices: The device of each trainer rank.
        targets: The device of each engine rank, by its number in the plan.

    Returns:
        For each engine rank, the trainer rank on its device. By trainer rank, what it sends to the trainer
        ranks on the devices of other engine ranks.

    Raises:
        ValueError: A device has no trainer rank.
    """
    local_trainers: list[int] = []
    relays: dict[int, dict[int, TransferSchedule]] = {}

    for target, device in targets.items():
        if device not in trainer_devices:
            raise ValueError(
                f"an engine rank works on device {device}, where there is no trainer rank: use "
                f"resharding.transport=group"
            )
        local_trainers.append(trainer_devices.index(device))
        for source, schedule in plan.of_target(target).schedules.items():
            # Only the trainer rank on the target's device shares memory with it; the others relay through
            # that rank.
            if source != local_trainers[-1]:
                relays.setdefault(source, {})[local_trainers[-1]] = schedule

    return local_trainers, {source: PeerTransfers(schedules) for source, schedules in relays.items()}


class DeviceSender(Sender):
    """Sends to the engine rank on its own device, and relays to trainer ranks on other devices.

    Args:
        p2p: The p2p group of the trainers.
        rank: The rank of this process in it.
    """

    def __init__(self, p2p: P2PGroup, rank: int) -> None:
        super().__init__()
        self._p2p = p2p
        self._rank = rank
        # Keyed by replica, and by the trainer rank on the target's device.
        self._relayed: dict[int, PeerTransfers] = {}
        self._receive_buffer: _DeviceReceiveBuffer | None = None

    def serve(
        self,
        replica: int,
        device_name: str,
        sources: PeerTransfers,
        dtype: torch.dtype,
        device: torch.device,
    ) -> IPCAddress:
        """Create the IPC buffers for the engine rank of a replica on this device.

        Args:
            replica: The number of the replica.
            device_name: The name of this device in the plan.
            sources: What the engine rank receives, by trainer rank. This rank may be one of them.
            dtype: The dtype of the messages.
            device: This device.
        """
        self._let_go()
        self._receive_buffer = _DeviceReceiveBuffer(replica, sources, self._rank, dtype, device, device_name)
        return self._receive_buffer.ipc.address

    def relay(self, replica: int, sends: PeerTransfers) -> None:
        """Set what this rank sends to other devices for `replica`, by the trainer ranks there."""
        self._relayed[replica] = sends

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
        channel = Channel(self._p2p, sends, receives=receive_buffer is not None)
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

    def __init__(
        self,
        replica: int,
        sources: PeerTransfers,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        device_name: str,
    ) -> None:
        self.replica = replica
        self._all = sources
        self.sources = sources
        self.own = rank if rank in sources.schedules else None
        self.ipc = IPCWriter(max(1, sources.largest) * dtype.itemsize, NUM_IPC_BUFFERS, device, device_name)
        self.nbytes = self.ipc.address.nbytes
        self._dtype = dtype

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


class IPCReads(Transfer):
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


# ---- the transport `group`


def group_transfers(
    plan: TransferPlan, targets: Sequence[int]
) -> tuple[dict[int, PeerTransfers], list[PeerTransfers]]:
    """Return what the members of one engine's group send and receive.

    The senders come first in the group, followed by the ranks of the engine.

    Args:
        plan: The whole transfer.
        targets: The engine's ranks, as the plan numbers them.

    Returns:
        For each sending trainer rank, in the order of their numbers in the group, what it sends by the engine
        ranks' numbers. For each engine rank, what it receives by the senders' numbers.
    """
    senders = sorted({source for source, target in plan.schedules if target in targets})
    numbers = {source: number for number, source in enumerate(senders)}

    sends = {
        source: PeerTransfers(
            {
                len(senders) + rank: plan.schedules[source, target]
                for rank, target in enumerate(targets)
                if (source, target) in plan.schedules
            }
        )
        for source in senders
    }
    receives = [
        PeerTransfers(
            {numbers[source]: schedule for source, schedule in plan.of_target(target).schedules.items()}
        )
        for target in targets
    ]
    return sends, receives


class GroupSender(Sender):
    def __init__(self) -> None:
        super().__init__()
        self._channels: dict[int, Channel] = {}

    def join(self, replica: int, p2p: P2PGroup | None, sends: PeerTransfers) -> None:
        """Add a replica, and what this rank sends to it, by the numbers of the engine's ranks.

        Args:
            p2p: The group of the replica. None: it reads files.
        """
        self.leave(replica)
        if p2p is not None:
            self._channels[replica] = Channel(p2p, sends, replica=replica)

    def open(
        self,
        shards: SentShards,
        replicas: Collection[int],
        first_round: int = 0,
        folder: Path | None = None,
    ) -> Transfer:
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

    def leave(self, replica: int) -> None:
        # Abort instead of closing, since messages to the replica may still be in flight.
        if (channel := self._channels.pop(replica, None)) is not None:
            channel.p2p.abort()

    def close(self) -> None:
        self.release()
        for channel in self._channels.values():
            channel.p2p.close()
        self._channels = {}


def receive_from_group(p2p: P2PGroup, destinations: DestinationViews, device: torch.device) -> Transfer:
    """Start a pass on an engine rank, which receives while the trainers send."""
    receive_buffer = _GroupReceiveBuffer(destinations, device)
    # An engine rank sends nothing, so there is nothing to pack.
    nothing = torch.empty(2, 0, device=device)
    channel = Channel(p2p, PeerTransfers(), receives=True)
    return PipelinedTransfer([channel], nothing, receive_buffer=receive_buffer, yields_regularly=True)


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
