"""The execution of a transfer plan on one rank, round by round: it packs what it sends and collects what it
gets in a receive buffer.

While a round travels the one before it is unpacked, so two messages are under way in each direction. A rank
that waits for long returns to its caller, which thus learns of a death that the communicator of a device
would not report.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import NamedTuple

import torch

from megarl.machine.usage import Stopwatch
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.schedule import Part, TransferSchedule
from megarl.weights.tensors import WeightTransferError

PATIENCE_S = 1.0  # the longest wait for the other side before returning to the caller
# An engine rank returns to its caller this often, so that the caller notices if it hangs.
TIME_SLICE_S = 10.0

Regions = Callable[[Part], Iterable[torch.Tensor]]  # views that hold the elements of a part, in their order


class PeerTransfers:
    """The transfer schedules between this rank and its peers, by the peers' ranks.

    The messages of a round are contiguous in memory, in the order of the peers.
    """

    def __init__(self, schedules: Mapping[int, TransferSchedule]) -> None:
        self.schedules = dict(sorted(schedules.items()))
        self.num_rounds = next(iter(self.schedules.values())).num_rounds if self.schedules else 0

    def of_round(self, number: int) -> Iterator[tuple[int, TransferSchedule, slice]]:
        """Yields peer, schedule, and the position of its message in the round."""
        start = 0
        for rank, schedule in self.schedules.items():
            if length := schedule.length(number):
                yield rank, schedule, slice(start, start + length)
                start += length

    def parts(self, number: int, flat: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yields the parts of a received round with their elements, in the shape of the slice. `flat`
        contains the round."""
        for _, schedule, where in self.of_round(number):
            position = where.start
            for part in schedule.message(number):
                stop = position + part.tensor_slice.volume
                yield part, flat[position:stop].view(part.tensor_slice.shape)
                position = stop

    def length(self, number: int) -> int:
        """Returns the number of elements of a round."""
        return sum(schedule.length(number) for schedule in self.schedules.values())

    @property
    def largest(self) -> int:
        """The number of elements of the largest round."""
        return max(map(self.length, range(self.num_rounds)), default=0)

    @property
    def numel(self) -> int:
        """The number of elements of all rounds."""
        return sum(schedule.numel for schedule in self.schedules.values())


class ReceiveBuffer(ABC):
    """The receive buffer of one target. Methods raise WeightTransferError if the target is gone.

    Attributes:
        sources: The schedules of its sources.
        own: This rank, if it is one of the sources.
        replica: The engine that it is for. None: the transfer cannot continue without the target.
    """

    sources: PeerTransfers
    own: int | None = None
    replica: int | None = None

    @abstractmethod
    def is_free(self, number: int) -> bool:
        """Whether the buffer of a round may be written. Waits at most PATIENCE_S for the target."""

    @abstractmethod
    def buffer(self, number: int) -> torch.Tensor:
        """Returns the flat buffer of a round, which has at least as many elements as the round."""

    def receives(self, number: int) -> Iterator[Message]:
        """Yields the messages of all other ranks in a round: where each segment is received."""
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
        """Returns the flat memory in which a part may be received directly. None: it is received in the
        buffer."""
        return None

    @abstractmethod
    def deliver(self, number: int) -> None:
        """Hands a round over, whose messages are all in its buffer."""

    def is_taken(self) -> bool:
        """Whether the target is done with all rounds. Waits at most PATIENCE_S for it."""
        return True


class Channel(NamedTuple):
    """What goes through one p2p group.

    Attributes:
        p2p: The group.
        sends: What this rank sends, by the peers' ranks in the group.
        receives: Whether messages to the receive buffer come through it.
        replica: The engine on the other side. None: the transfer cannot continue without the peers.
    """

    p2p: P2PGroup
    sends: PeerTransfers
    receives: bool = False
    replica: int | None = None


class PipelinedTransfer:
    """Runs this rank's part of a transfer: it packs and sends one round while the round before it travels.

    Args:
        channels: The groups that it uses.
        num_rounds: The number of rounds.
        buffers: (2, N) elements to pack the rounds into, in turns.
        regions: Finds the elements of a part that this rank sends.
        receive_buffer: Where it receives, if it does.
        yields_regularly: Whether it returns to the caller every TIME_SLICE_S even if no peer is slow.

    Attributes:
        lost: Replicas that are gone or were dropped, with the reason.
        packing: The time that it took to copy.
        waiting_s: The time that it waited for others.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        num_rounds: int,
        buffers: torch.Tensor,
        regions: Regions | None = None,
        receive_buffer: ReceiveBuffer | None = None,
        yields_regularly: bool = False,
    ) -> None:
        self._channels = tuple(channels)
        self._num_rounds = num_rounds
        self._buffers = buffers
        self._regions = regions
        self._receive_buffer = receive_buffer
        self._pending: dict[tuple[Channel, int], PendingMessages] = {}
        self._steps = self._work()
        self._time_slice_s = TIME_SLICE_S if yields_regularly else float("inf")
        self._deadline_s = 0.0
        self.lost: dict[int, str] = {}
        self.packing = Stopwatch(buffers.device)
        self.waiting_s = 0.0

    def run(self, dropped: Collection[int] = ()) -> bool:
        """Continues the transfer. Returns False after a while without progress of the other side; call it
        again then.

        Args:
            dropped: Replicas that are dead.

        Raises:
            WeightTransferError: A peer is gone without which the transfer cannot continue.
        """
        for replica in set(dropped) - self.lost.keys():
            self._lose(replica, WeightTransferError("it was dropped"))
        self._deadline_s = time.monotonic() + self._time_slice_s

        with torch.no_grad():
            # The generator yields after a long wait or a time slice; when it ends the transfer is complete.
            for _ in self._steps:
                return False

        return True

    # ---- the work: a generator that yields when it has waited for PATIENCE_S

    def _work(self) -> Iterator[None]:
        for number in range(self._num_rounds):
            # Return to the caller from time to time, even if no peer is slow.
            if time.monotonic() > self._deadline_s:
                yield
            # Two pack buffers alternate, so the messages of round n - 2 must have been sent by now.
            yield from self._arrival(number - 2)
            yield from self._until(self._ask_buffer(methodcaller("is_free", number)))
            self._start(number)
            # Unpack the previous round while this one travels.
            if self._receive_buffer is not None:
                yield from self._delivery(number - 1)

        # The last two rounds are still under way.
        yield from self._arrival(self._num_rounds - 2)
        yield from self._delivery(self._num_rounds - 1)
        yield from self._until(self._ask_buffer(lambda receive_buffer: receive_buffer.is_taken()))

    def _until(self, is_so: Callable[[], bool]) -> Iterator[None]:
        start_s = time.perf_counter()
        while not is_so():
            yield
        self.waiting_s += time.perf_counter() - start_s

    def _arrival(self, number: int) -> Iterator[None]:
        """Waits for all messages of a round."""
        for channel in self._channels:
            yield from self._until(partial(self._has_arrived, channel, number))

    def _has_arrived(self, channel: Channel, number: int) -> bool:
        transfer = self._pending.get((channel, number))
        if transfer is None or (channel.replica is not None and channel.replica in self.lost):
            return True

        try:
            if not transfer.is_done(PATIENCE_S):
                return False
        except WeightTransferError as error:
            self._lose(channel.replica, error)

        self._pending.pop((channel, number), None)
        return True

    def _delivery(self, number: int) -> Iterator[None]:
        yield from self._arrival(number)
        if number >= 0:
            self._ask_buffer(lambda receive_buffer: receive_buffer.deliver(number))()

    def _ask_buffer(self, ask: Callable[[ReceiveBuffer], bool | None]) -> Callable[[], bool]:
        """Asks the receive buffer. The answer is yes if there is none or its target is lost, since the
        messages of others still arrive."""

        def answer() -> bool:
            receive_buffer = self._receive_buffer
            if receive_buffer is None or (
                receive_buffer.replica is not None and receive_buffer.replica in self.lost
            ):
                return True

            try:
                return bool(ask(receive_buffer))
            except WeightTransferError as error:
                self._lose(receive_buffer.replica, error)
                return True

        return answer

    def _lose(self, replica: int | None, error: WeightTransferError) -> None:
        if replica is None:
            raise error
        self.lost[replica] = str(error)

        # Only the messages to and from this replica end; the transfer to the others continues.
        for channel in self._channels:
            if channel.replica == replica:
                channel.p2p.abort()
                self._pending = {
                    key: transfer for key, transfer in self._pending.items() if key[0] is not channel
                }

    # ---- one round

    def _start(self, number: int) -> None:
        position = 0
        for channel in self._channels:
            if channel.replica is not None and channel.replica in self.lost:
                continue
            # All messages of the round are packed one behind the other in its buffer.
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
            # Sends and receives start together, so that two ranks cannot wait for each other.
            if sends or receives:
                try:
                    self._pending[channel, number] = channel.p2p.start(sends, receives, number)
                except WeightTransferError as error:
                    self._lose(channel.replica, error)

        # What the target gets from this very rank is copied while the messages travel.
        if (receive_buffer := self._receive_buffer) is not None and receive_buffer.own is not None:
            for peer, schedule, where in receive_buffer.sources.of_round(number):
                if peer == receive_buffer.own:
                    self._pack(
                        self._regions_of(schedule.message(number)), receive_buffer.buffer(number)[where]
                    )

    def _segments(
        self, schedule: TransferSchedule, number: int, flat: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yields a message in segments. Contiguous parts are sent from the model, and the rest is packed into
        `flat`."""
        for parts in schedule.segments(number):
            regions = list(self._regions_of(parts))
            if len(regions) == 1 and regions[0].is_contiguous():
                yield regions[0].view(-1)
                continue
            length = sum(region.numel() for region in regions)
            self._pack(regions, flat[:length])
            yield flat[:length]
            flat = flat[length:]

    def _regions_of(self, parts: Iterable[Part]) -> Iterator[torch.Tensor]:
        assert self._regions is not None
        for part in parts:
            yield from self._regions(part)

    def _pack(self, regions: Iterable[torch.Tensor], flat: torch.Tensor) -> None:
        with self.packing:
            sources = list(regions)
            targets = flat.split([source.numel() for source in sources])
            copy_tensors(
                [target.view(source.shape) for target, source in zip(targets, sources, strict=True)], sources
            )


def copy_tensors(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to the target of its shape.

    Contiguous tensors are copied together, in few kernels: a kernel per tensor takes a GPU less time than
    the host needs to launch it.
    """
    together = []
    for target, source in zip(targets, sources, strict=True):
        if target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype:
            together.append((target, source))
        else:
            target.copy_(source)

    if together:
        torch._foreach_copy_([target for target, _ in together], [source for _, source in together])
