"""One rank's part in a transfer, round by round: it packs what it sends, and what it receives comes together in its inbox.

While a round travels the one before it is unpacked, so that two messages' worth is under way in each direction. Nobody waits for long
without giving the word back: whoever runs the ranks learns of a death that a device's communicator would not tell of.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.machine.usage import Stopwatch
from megarl.weights.p2p import Message, UnderWay, Wire
from megarl.weights.plan import Part, Stream
from megarl.weights.tensors import WeightTransferError

PATIENCE_S = 1.0  # without a word from the other side
SLICE_S = 10.0  # of an engine rank's work at a time: whoever waits for it must know whether it hangs

Regions = Callable[[Part], Iterable[torch.Tensor]]  # views that hold the elements of a part, in their order


class Side:
    """Streams between this rank and others, by the others' ranks. In a round their messages lie side by side, in the order of ranks."""

    def __init__(self, streams: Mapping[int, Stream]) -> None:
        self.streams = dict(sorted(streams.items()))
        self.num_rounds = next(iter(self.streams.values())).num_rounds if self.streams else 0

    def of_round(self, number: int) -> Iterator[tuple[int, Stream, slice]]:
        """Rank, stream, and where its message lies."""
        start = 0
        for rank, stream in self.streams.items():
            if length := stream.length(number):
                yield rank, stream, slice(start, start + length)
                start += length

    def parts(self, number: int, flat: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """What came in a round, which lies in `flat`: each part, and its elements in the shape of its box."""
        for _, stream, where in self.of_round(number):
            position = where.start
            for part in stream.message(number):
                stop = position + part.box.volume
                yield part, flat[position:stop].view(part.box.shape)
                position = stop

    def length(self, number: int) -> int:
        """Elements of a round."""
        return sum(stream.length(number) for stream in self.streams.values())

    @property
    def largest(self) -> int:
        """Elements of the largest round."""
        return max(map(self.length, range(self.num_rounds)), default=0)

    @property
    def numel(self) -> int:
        """Of all rounds."""
        return sum(stream.numel for stream in self.streams.values())


class Inbox(ABC):
    """Where the messages to one target come together. `sources`: theirs. `own`: of these the rank that is this one, where it is.
    `replica`: the engine that it is for, None where the transfer cannot go on without it. Methods raise WeightTransferError where
    the target is gone."""

    sources: Side
    own: int | None = None
    replica: int | None = None

    @abstractmethod
    def is_free(self, number: int) -> bool:
        """Whether the slot of round `number` may be written to; False after PATIENCE_S without a word from the target."""

    @abstractmethod
    def slot(self, number: int) -> torch.Tensor:
        """Flat, of at least as many elements as the round has."""

    def receives(self, number: int) -> Iterator[Message]:
        """Of all but this rank, and where each segment of their messages comes to lie."""
        slot = self.slot(number)
        for peer, stream, where in self.sources.of_round(number):
            start = where.start
            for parts in stream.segments(number) if peer != self.own else ():
                stop = start + sum(part.box.volume for part in parts)
                place = self.place(number, parts[0]) if len(parts) == 1 else None
                yield peer, slot[start:stop] if place is None else place
                start = stop

    def place(self, number: int, part: Part) -> torch.Tensor | None:
        """Flat, where a part may come to lie in place of the slot."""
        return None

    @abstractmethod
    def deliver(self, number: int) -> None:
        """All messages of the round lie in its slot."""

    def is_taken(self) -> bool:
        """Whether the target is done with all rounds; False after PATIENCE_S without a word from it."""
        return True


class Lane(NamedTuple):
    """A wire, what this rank sends over it by the others' ranks there, and whether messages to the inbox come over it. `replica`: the
    engine on its other end, None where the transfer cannot go on without it."""

    wire: Wire
    sends: Side
    receives: bool = False
    replica: int | None = None


class Rounds:
    """A transfer. `regions`: of what this rank sends. `buffers`: two, each for what it sends in a round. `pauses`: it gives the word back
    every SLICE_S, also where all goes well.

    lost: replicas that are gone or were given up, and why. packing, waiting_s: what it took to copy, and waiting for others.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        num_rounds: int,
        buffers: torch.Tensor,
        regions: Regions | None = None,
        inbox: Inbox | None = None,
        pauses: bool = False,
    ) -> None:
        self._lanes = tuple(lanes)
        self._num_rounds = num_rounds
        self._buffers, self._regions, self._inbox = buffers, regions, inbox
        self._under_way: dict[tuple[Lane, int], UnderWay] = {}
        self._steps = self._work()
        self._slice_s = SLICE_S if pauses else float("inf")
        self._give_up_s = 0.0
        self.lost: dict[int, str] = {}
        self.packing = Stopwatch(buffers.device)
        self.waiting_s = 0.0

    def run(self, given_up: Collection[int] = ()) -> bool:
        """Whether all is done; False after a while without a word from the other side: to be called again, it goes on.

        given_up: replicas that are dead. Raises WeightTransferError where someone is gone without whom there is no transfer.
        """
        for replica in set(given_up) - self.lost.keys():
            self._lose(replica, WeightTransferError("it was dropped"))
        self._give_up_s = time.monotonic() + self._slice_s
        with torch.no_grad():
            for _ in self._steps:
                return False
        return True

    # ---- the work: it yields where patience has run out

    def _work(self) -> Iterator[None]:
        for number in range(self._num_rounds):
            if time.monotonic() > self._give_up_s:
                yield
            yield from self._arrival(number - 2)
            yield from self._until(self._of_inbox(lambda inbox, number=number: inbox.is_free(number)))  # type: ignore[misc]
            self._start(number)
            if self._inbox is not None:
                yield from self._delivery(number - 1)
        yield from self._arrival(self._num_rounds - 2)
        yield from self._delivery(self._num_rounds - 1)
        yield from self._until(self._of_inbox(lambda inbox: inbox.is_taken()))

    def _until(self, is_so: Callable[[], bool]) -> Iterator[None]:
        start_s = time.perf_counter()
        while not is_so():
            yield
        self.waiting_s += time.perf_counter() - start_s

    def _arrival(self, number: int) -> Iterator[None]:
        """Of all that this rank sends and receives in a round."""
        for lane in self._lanes:
            yield from self._until(lambda lane=lane: self._has_arrived(lane, number))  # type: ignore[misc]

    def _has_arrived(self, lane: Lane, number: int) -> bool:
        transfer = self._under_way.get((lane, number))
        if transfer is None or (lane.replica is not None and lane.replica in self.lost):
            return True
        try:
            if not transfer.is_done(PATIENCE_S):
                return False
        except WeightTransferError as error:
            self._lose(lane.replica, error)
        self._under_way.pop((lane, number), None)
        return True

    def _delivery(self, number: int) -> Iterator[None]:
        yield from self._arrival(number)
        if number >= 0:
            self._of_inbox(lambda inbox: inbox.deliver(number))()

    def _of_inbox(self, ask: Callable[[Inbox], bool | None]) -> Callable[[], bool]:
        """What the inbox says; yes where there is none, or nobody takes from it any more: what others send still comes."""

        def answer() -> bool:
            inbox = self._inbox
            if inbox is None or (inbox.replica is not None and inbox.replica in self.lost):
                return True
            try:
                return bool(ask(inbox))
            except WeightTransferError as error:
                self._lose(inbox.replica, error)
                return True

        return answer

    def _lose(self, replica: int | None, error: WeightTransferError) -> None:
        if replica is None:
            raise error
        self.lost[replica] = str(error)
        for lane in self._lanes:
            if lane.replica == replica:
                lane.wire.abort()
                self._under_way = {key: transfer for key, transfer in self._under_way.items() if key[0] is not lane}

    # ---- one round

    def _start(self, number: int) -> None:
        position = 0
        for lane in self._lanes:
            if lane.replica is not None and lane.replica in self.lost:
                continue
            sends = []
            for peer, stream, _ in lane.sends.of_round(number):
                flat = self._buffers[number % 2][position : position + stream.length(number)]
                position += len(flat)
                sends += [(peer, segment) for segment in self._segments(stream, number, flat)]
            receives = list(self._inbox.receives(number)) if lane.receives and self._inbox is not None else []
            if sends or receives:
                try:
                    self._under_way[lane, number] = lane.wire.start(sends, receives, number)
                except WeightTransferError as error:
                    self._lose(lane.replica, error)
        if (inbox := self._inbox) is not None and inbox.own is not None:
            for peer, stream, where in inbox.sources.of_round(number):
                if peer == inbox.own:
                    self._pack(self._regions_of(stream.message(number)), inbox.slot(number)[where])

    def _segments(self, stream: Stream, number: int, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Of a message. What lies in one piece in the model is sent from there, the rest is packed into `flat`."""
        for parts in stream.segments(number):
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
            position = 0
            for region in regions:
                stop = position + region.numel()
                flat[position:stop].view(region.shape).copy_(region)
                position = stop
