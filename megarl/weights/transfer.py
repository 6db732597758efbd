"""The part of one rank in a transfer: it executes a plan, round by round.

The rank packs what it sends and collects what it receives in a receive buffer. The previous round is unpacked
while the current one travels, so two messages are in flight in each direction. A rank that waits for a long
time returns to its caller, which can then notice the death of a peer that the communicator of a device does
not report.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import NamedTuple

import torch

from megarl.machine.usage import PeakMemory, Stopwatch
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.tensors import Part, PeerTransfers, TransferSchedule, WeightTransferError

PATIENCE_S = 1.0  # the longest wait for a peer before returning to the caller
# An engine rank returns to its caller this often, so that the caller notices if it hangs.
TIME_SLICE_S = 10.0
# yields the views that contain the elements of a part, in order
Regions = Callable[[Part], Iterable[torch.Tensor]]


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
        peak: Measures memory from before the buffers of a sender are allocated.

    Attributes:
        lost: The reason for each replica that is gone or was dropped.
        packing: The time spent copying.
        waiting_s: The time spent waiting for peers, in seconds.
        planned_bytes: The bytes of all weights that this rank sends.
        sent_bytes: The bytes that were sent; without patches, as many as planned.
        buffer_bytes: The size of all buffers.
    """

    planned_bytes = 0
    sent_bytes = 0
    buffer_bytes = 0

    def __init__(
        self,
        channels: Sequence[Channel],
        device: torch.device,
        yields_regularly: bool = False,
        peak: PeakMemory | None = None,
    ) -> None:
        self._channels = tuple(channels)
        self._pending: dict[tuple[Channel, int], PendingMessages] = {}
        self._steps = self._work()
        self._time_slice_s = TIME_SLICE_S if yields_regularly else float("inf")
        self._deadline_s = 0.0
        self._peak = peak
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
        assert self._peak is not None
        return SendReport(
            packing_s=self.packing.seconds(),
            waiting_s=self.waiting_s,
            nbytes=self.sent_bytes,
            full_bytes=self.planned_bytes,
            planned_extra_bytes=self.buffer_bytes,
            measured_extra_bytes=self._peak.extra_bytes(),
            lost=self.lost,
        )

    def close(self) -> None:
        """End the transfer, even in the middle of it."""
        self._steps = iter(())

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
            if not transfer(PATIENCE_S):
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


class ReceiveBuffer(ABC):
    """The receive buffer of one target. Methods raise WeightTransferError if the target is gone.

    Attributes:
        sources: The schedules of its sources.
        own: This rank, if it is one of the sources.
        nbytes: The size of the target's buffers.
        replica: The engine that it is for. None: the transfer cannot continue without the target.
    """

    sources: PeerTransfers
    own: int | None = None
    nbytes: int
    replica: int | None = None

    @property
    def own_numel(self) -> int:
        """The number of elements that the target gets from this rank."""
        return 0 if self.own is None else self.sources.schedules[self.own].numel

    @abstractmethod
    def is_free(self, number: int) -> bool:
        """Return whether the buffer of a round may be written, after at most PATIENCE_S."""

    @abstractmethod
    def buffer(self, number: int) -> torch.Tensor:
        """Return the flat buffer of a round. It has at least as many elements as the round."""

    def receives(self, number: int) -> Iterator[Message]:
        """Yield the messages of other ranks in a round: the peer, and where a segment is received."""
        buffer = self.buffer(number)
        for peer, schedule, where in self.sources.of_round(number):
            start = where.start
            for parts in schedule.segments(number) if peer != self.own else ():
                stop = start + sum(part.tensor_slice.volume for part in parts)
                # A segment of several parts is contiguous only in the buffer, not in the model.
                place = self.place(number, parts[0]) if len(parts) == 1 else None
                yield peer, buffer[start:stop] if place is None else place
                start = stop

    def place(self, number: int, part: Part) -> torch.Tensor | None:
        """Return the flat memory that a part may be received into directly, None to use the buffer."""
        return None

    @abstractmethod
    def deliver(self, number: int) -> None:
        """Hand a round over to the target once all of its messages are in the buffer."""

    def is_taken(self) -> bool:
        """Return whether the target has taken all rounds, after at most PATIENCE_S."""
        return True


class PipelinedTransfer(Transfer):
    """Runs this rank's part of a transfer: packs and sends one round while the previous one travels.

    Args:
        channels: The p2p groups to use.
        buffers: (2, N) pack buffers, used alternately.
        regions: Finds the elements of a part that this rank sends.
        receive_buffer: The receive buffer, if this rank receives.
        yields_regularly: Whether to return to the caller every TIME_SLICE_S even if no peer is slow.
        are_computed: Whether regions are computed when they are asked for, so that each is packed, and freed,
            before the next one. Otherwise they are views of parameters, which may be sent in place.
        peak: See Transfer.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        buffers: torch.Tensor,
        regions: Regions | None = None,
        receive_buffer: ReceiveBuffer | None = None,
        yields_regularly: bool = False,
        *,
        are_computed: bool = False,
        peak: PeakMemory | None = None,
    ) -> None:
        super().__init__(channels, buffers.device, yields_regularly, peak)
        self._buffers = buffers
        self._regions = regions
        self._are_computed = are_computed
        self._receive_buffer = receive_buffer

        exchanged = [channel.sends for channel in channels]
        exchanged += [] if receive_buffer is None else [receive_buffer.sources]
        self._num_rounds = max((each.num_rounds for each in exchanged), default=0)
        own, kept = (0, 0) if receive_buffer is None else (receive_buffer.own_numel, receive_buffer.nbytes)
        numel = own + sum(channel.sends.numel for channel in channels)
        self.planned_bytes = self.sent_bytes = numel * buffers.element_size()
        self.buffer_bytes = buffers.nbytes + kept

    def _work(self) -> Iterator[None]:
        for number in range(self._num_rounds):
            # Return to the caller regularly, even if no peer is slow.
            if not self._has_time:
                yield
            # Two pack buffers alternate, so the messages of round n - 2 must have been sent by now.
            yield from self._arrival(number - 2)
            yield from self._until(partial(self._ask_buffer, methodcaller("is_free", number)))
            self._start(number)
            # Unpack the previous round while this one travels.
            if self._receive_buffer is not None:
                yield from self._delivery(number - 1)

        # The last two rounds are still in flight.
        yield from self._arrival(self._num_rounds - 2)
        yield from self._delivery(self._num_rounds - 1)
        yield from self._until(partial(self._ask_buffer, methodcaller("is_taken")))

    def _delivery(self, number: int) -> Iterator[None]:
        yield from self._arrival(number)
        if number >= 0:
            self._ask_buffer(methodcaller("deliver", number))

    def _ask_buffer(self, ask: Callable[[ReceiveBuffer], bool | None]) -> bool:
        """Ask the receive buffer.

        The answer is True if there is no receive buffer or its target is lost, since messages of other ranks
        still arrive.
        """
        receive_buffer = self._receive_buffer
        if receive_buffer is None or receive_buffer.replica in self.lost:
            return True
        try:
            return bool(ask(receive_buffer))
        except WeightTransferError as error:
            self._lose(receive_buffer.replica, error)
            return True

    # ---- one round

    def _start(self, number: int) -> None:
        position = 0
        for channel in self._channels:
            if self._is_lost(channel):
                continue
            # All messages of the round are packed consecutively in its buffer.
            sends = []
            for peer, schedule, _ in channel.sends.of_round(number):
                flat = self._buffers[number % 2][position : position + schedule.length(number)]
                position += len(flat)
                sends += [(peer, segment) for segment in self._segments(schedule, number, flat)]
            receives = (
                list(self._receive_buffer.receives(number))
                if channel.receives and self._receive_buffer is not None
                else []
            )
            # Sends and receives start together to rule out a deadlock between two ranks.
            if sends or receives:
                self._exchange(channel, sends, receives, number)

        # Data that the target receives from this same rank is copied while the messages travel.
        if (receive_buffer := self._receive_buffer) is not None and receive_buffer.own is not None:
            for peer, schedule, where in receive_buffer.sources.of_round(number):
                if peer == receive_buffer.own:
                    self._pack(
                        self._regions_of(schedule.message(number)), receive_buffer.buffer(number)[where]
                    )

    def _segments(
        self, schedule: TransferSchedule, number: int, flat: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield the segments of a message. Contiguous parts are sent in place, others packed into `flat`."""
        for parts in schedule.segments(number):
            regions: Iterable[torch.Tensor] = self._regions_of(parts)
            # Computed regions are no views of the weights, so they cannot be sent in place.
            if not self._are_computed:
                views = list(regions)
                if len(views) == 1 and views[0].is_contiguous():
                    yield views[0].view(-1)
                    continue
                regions = views
            length = sum(part.tensor_slice.volume for part in parts)
            self._pack(regions, flat[:length])
            yield flat[:length]
            flat = flat[length:]

    def _regions_of(self, parts: Iterable[Part]) -> Iterator[torch.Tensor]:
        assert self._regions is not None
        for part in parts:
            yield from self._regions(part)

    def _pack(self, regions: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
        with self.packing:
            pack(regions, flat, self._are_computed)


def pack(regions: Iterable[torch.Tensor], flat: torch.Tensor, are_computed: bool) -> None:
    """Copy regions to flat memory, one after another.

    Args:
        flat: Memory of at least as many elements.
        are_computed: Whether regions are computed when they are asked for, so that each is freed before the
            next one.
    """
    if are_computed:
        for region in regions:
            flat[: region.numel()].view(region.shape).copy_(region)
            flat = flat[region.numel() :]
        return

    sources = list(regions)
    targets = flat.split([source.numel() for source in sources])
    copy_tensors(
        [target.view(source.shape) for target, source in zip(targets, sources, strict=True)], sources
    )


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to the target at the same position.

    Contiguous tensors are copied together in a few kernels: copying one tensor takes a GPU less time than
    launching the kernel takes the host.
    """
    together = []
    for target, source in zip(targets, sources, strict=True):
        if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype:
            together.append((target, source))
        else:
            target.copy_(source)

    if together:
        torch._foreach_copy_([target for target, _ in together], [source for _, source in together])
