"""The transport `group`: point-to-point messages in a process group of one engine and its trainer ranks.

Each engine has a separate group, so that replacing one does not make the others meet again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from megarl.machine.usage import PeakMemory
from megarl.weights.p2p import P2PGroup
from megarl.weights.plan import TransferPlan
from megarl.weights.tensors import Part, PeerTransfers
from megarl.weights.transfer import Channel, PipelinedTransfer, ReceiveBuffer, Transfer
from megarl.weights.transports.interface import DestinationViews, Sender, SentShards


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
