"""The part of one rank in a transfer: messages in flight, and the loss of peers.

A rank that waits for a long time returns to its caller, which can then notice the death of a peer that the
communicator of a device does not report.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megarl.machine.usage import PeakMemory, Stopwatch
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.schedule import PeerTransfers
from megarl.weights.tensors import WeightTransferError

PATIENCE_S = 1.0  # the longest wait for a peer before returning to the caller
# An engine rank returns to its caller this often, so that the caller notices if it hangs.
TIME_SLICE_S = 10.0


class SendReport(NamedTuple):
    """Measurements of one pass on one rank.

    Attributes:
        packing_s: The time spent copying into messages, in seconds.
        waiting_s: The time spent waiting for peers, in seconds.
        nbytes: The bytes that this rank sent.
        full_bytes: The bytes of the weights, of which it may have sent only what changed.
        planned_extra_bytes: The size of all buffers.
        measured_extra_bytes: The peak memory of the process above its use at the start of the pass. Buffers
            kept from the previous pass are not counted.
        lost: The reason for each replica that is gone or was dropped.
    """

    packing_s: float
    waiting_s: float
    nbytes: int
    full_bytes: int
    planned_extra_bytes: int
    measured_extra_bytes: int
    lost: Mapping[int, str]


class Channel(NamedTuple):
    """One p2p group and what this rank sends and receives through it.

    Attributes:
        p2p: The group.
        sends: What this rank sends, by the peers' ranks in the group.
        receives: Whether messages to the receive buffer come through this group.
        replica: The engine on the other side. None: the transfer cannot continue without the peers.
    """

    p2p: P2PGroup
    sends: PeerTransfers
    receives: bool = False
    replica: int | None = None


class Transfer(ABC):
    """Runs this rank's part of a transfer, which may take several calls.

    Args:
        channels: The p2p groups to use.
        device: The device of the messages.
        yields_regularly: Whether to return to the caller every TIME_SLICE_S even if no peer is slow.

    Attributes:
        lost: The reason for each replica that is gone or was dropped.
        packing: The time spent copying.
        waiting_s: The time spent waiting for peers, in seconds.
        planned_bytes: The bytes of all weights that this rank sends.
        sent_bytes: The bytes that were sent; without patches, as many as planned.
        buffer_bytes: The size of all buffers.
        peak: Measures memory from before the buffers of a sender are allocated.
    """

    planned_bytes = 0
    sent_bytes = 0
    buffer_bytes = 0
    peak: PeakMemory

    def __init__(
        self, channels: Sequence[Channel], device: torch.device, yields_regularly: bool = False
    ) -> None:
        self._channels = tuple(channels)
        self._pending: dict[tuple[Channel, int], PendingMessages] = {}
        self._steps = self._work()
        self._time_slice_s = TIME_SLICE_S if yields_regularly else float("inf")
        self._deadline_s = 0.0
        self.lost: dict[int, str] = {}
        self.packing = Stopwatch(device)
        self.waiting_s = 0.0

    def run(self, dropped: Collection[int] = ()) -> bool:
        """Continue the transfer until it is complete or has not progressed for a while.

        Args:
            dropped: Replicas that are dead.

        Returns:
            True when the transfer is complete. After False, call the method again.

        Raises:
            WeightTransferError: A peer is gone without which the transfer cannot continue.
        """
        for replica in set(dropped) - self.lost.keys():
            self._lose(replica, WeightTransferError("it was dropped"))
        self._deadline_s = time.monotonic() + self._time_slice_s

        with torch.no_grad():
            # The generator yields after a long wait or a time slice; when it ends, the transfer is complete.
            for _ in self._steps:
                return False

        return True

    def report(self) -> SendReport:
        """Return the measurements of a complete pass of a sender."""
        return SendReport(
            packing_s=self.packing.seconds(),
            waiting_s=self.waiting_s,
            nbytes=self.sent_bytes,
            full_bytes=self.planned_bytes,
            planned_extra_bytes=self.buffer_bytes,
            measured_extra_bytes=self.peak.extra_bytes(),
            lost=self.lost,
        )

    @abstractmethod
    def _work(self) -> Iterator[None]:
        """Do the work. Yields after waiting for PATIENCE_S, and if the time slice has ended."""

    @property
    def _has_time(self) -> bool:
        return time.monotonic() <= self._deadline_s

    # ---- waiting

    def _until(self, is_so: Callable[[], bool]) -> Iterator[None]:
        start_s = time.perf_counter()
        while not is_so():
            yield
        self.waiting_s += time.perf_counter() - start_s

    def _arrival(self, number: int) -> Iterator[None]:
        """Wait for all messages of a round."""
        for channel in self._channels:
            yield from self._until(partial(self._has_arrived, channel, number))

    def _has_arrived(self, channel: Channel, number: int) -> bool:
        transfer = self._pending.get((channel, number))
        if transfer is None or self._is_lost(channel):
            return True

        try:
            if not transfer.is_done(PATIENCE_S):
                return False
        except WeightTransferError as error:
            self._lose(channel.replica, error)

        self._pending.pop((channel, number), None)
        return True

    # ---- messages

    def _is_lost(self, channel: Channel) -> bool:
        return channel.replica is not None and channel.replica in self.lost

    def _exchange(
        self, channel: Channel, sends: Sequence[Message], receives: Sequence[Message], number: int
    ) -> None:
        """Start the messages of a round."""
        try:
            self._pending[channel, number] = channel.p2p.start(sends, receives, number)
        except WeightTransferError as error:
            self._lose(channel.replica, error)

    def _lose(self, replica: int | None, error: WeightTransferError) -> None:
        if replica is None:
            raise error
        self.lost[replica] = str(error)

        # Only messages to and from this replica end; the transfer to the others continues.
        for channel in self._channels:
            if channel.replica == replica:
                channel.p2p.abort()
                self._pending = {
                    key: transfer for key, transfer in self._pending.items() if key[0] is not channel
                }
