"""The schedules of what one rank sends to others, in rounds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megarl.weights.tensors import TensorSlice, range_slices

if TYPE_CHECKING:  # planning must not import torch
    import torch

_LARGE = 2**18  # parts with this many elements are sent separately, which is faster than copying them


class Part(NamedTuple):
    """A slice of the tensor `name`, or as much of it as fits in a message. Sent in row-major order."""

    name: str
    tensor_slice: TensorSlice


ScheduleKey = tuple[tuple[Part, ...], tuple[int, ...]]


class TransferSchedule:
    """Everything that one rank sends to another, in order, over all rounds.

    Round n contains elements bounds[n] to bounds[n + 1]. By default, each round contains the same fraction of
    the elements.
    """

    def __init__(
        self, parts: Sequence[Part], num_rounds: int = 1, bounds: Sequence[int] | None = None
    ) -> None:
        self.parts = tuple(parts)
        self._ends = list(accumulate(part.tensor_slice.volume for part in parts))
        self.num_rounds = num_rounds if bounds is None else len(bounds) - 1
        self._bounds = bounds
        self._messages: dict[int, tuple[Part, ...]] = {}  # cached, because every weight sync needs them again

    @property
    def bounds(self) -> Sequence[int]:
        # Computed by the ranks that need it: the driver has the schedules of all ranks, and sends them.
        if self._bounds is None:
            numel = self.numel
            self._bounds = [numel * number // self.num_rounds for number in range(self.num_rounds + 1)]
        return self._bounds

    @property
    def numel(self) -> int:
        return self._ends[-1] if self._ends else 0

    def after(self, first_round: int) -> TransferSchedule:
        """Return the schedule without the rounds before `first_round`."""
        start = self.bounds[first_round]
        parts = list(self._parts_between(start, self.numel))
        return TransferSchedule(parts, bounds=[bound - start for bound in self.bounds[first_round:]])

    @property
    def key(self) -> ScheduleKey:
        """The identity of the schedule. Equal schedules have the same elements, in order, and rounds."""
        return self.parts, tuple(self.bounds)

    def in_chunks(self, most: int) -> TransferSchedule:
        """Return the schedule in rounds of at most `most` elements, whatever its rounds are."""
        return TransferSchedule(self.parts, bounds=[*range(0, self.numel, most), self.numel])

    @property
    def largest(self) -> int:
        """The number of elements in the largest message."""
        return max(map(self.length, range(self.num_rounds)), default=0)

    def length(self, number: int) -> int:
        """Return the number of elements in the message of a round."""
        return self.bounds[number + 1] - self.bounds[number]

    def message(self, number: int) -> tuple[Part, ...]:
        """Return the parts in the message of a round."""
        if number not in self._messages:
            self._messages[number] = tuple(self._parts_between(*self.bounds[number : number + 2]))
        return self._messages[number]

    def _parts_between(self, start: int, stop: int) -> Iterator[Part]:
        # The part that contains the element `start`.
        index = bisect_right(self._ends, start)
        while start < stop:
            (name, tensor_slice), end = self.parts[index], self._ends[index]
            first = end - tensor_slice.volume
            # Parts within one round are passed on whole; a round boundary splits a part into slices.
            if start == first and stop >= end:
                yield self.parts[index]
            else:
                for rows in range_slices(tensor_slice.shape, start - first, min(stop, end) - first):
                    yield Part(name, rows.relative_to((0,) * len(tensor_slice.starts), tensor_slice.starts))
            start = end
            index = index + 1

    def segments(self, number: int) -> Iterator[list[Part]]:
        """Yield the message of a round in segments: large parts separately, small neighbors together."""
        small: list[Part] = []
        for part in self.message(number):
            if part.tensor_slice.volume < _LARGE:
                small.append(part)
                continue
            if small:
                yield small
                small = []
            yield [part]

        if small:
            yield small


class PeerTransfers:
    """The transfer schedules of what one rank sends to its peers, or receives from them, by the peers' ranks.

    The messages of a round are contiguous in memory, in the order of the peers.
    """

    def __init__(self, schedules: Mapping[int, TransferSchedule] = MappingProxyType({})) -> None:
        self.schedules = dict(sorted(schedules.items()))
        self.num_rounds = next(iter(self.schedules.values())).num_rounds if self.schedules else 0
        self._later: dict[int, PeerTransfers] = {0: self}

    def after(self, first_round: int) -> PeerTransfers:
        """Return the transfers without the rounds before `first_round`. They are made once."""
        if first_round not in self._later:
            self._later[first_round] = PeerTransfers(
                {rank: schedule.after(first_round) for rank, schedule in self.schedules.items()}
            )
        return self._later[first_round]

    def of_round(self, number: int) -> Iterator[tuple[int, TransferSchedule, slice]]:
        """Yield each peer, its schedule, and the position of its message in the round."""
        start = 0
        for rank, schedule in self.schedules.items():
            if length := schedule.length(number):
                yield rank, schedule, slice(start, start + length)
                start += length

    def parts(self, number: int, flat: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        """Yield the parts of a received round with their elements, shaped like the slice.

        Args:
            number: The round.
            flat: The flat buffer that contains the round.
        """
        for _, schedule, where in self.of_round(number):
            position = where.start
            for part in schedule.message(number):
                stop = position + part.tensor_slice.volume
                yield part, flat[position:stop].view(part.tensor_slice.shape)
                position = stop

    def length(self, number: int) -> int:
        """Return the number of elements in a round."""
        return sum(schedule.length(number) for schedule in self.schedules.values())

    @property
    def largest(self) -> int:
        """The number of elements in the largest round."""
        return max(map(self.length, range(self.num_rounds)), default=0)

    @property
    def numel(self) -> int:
        """The number of elements in all rounds."""
        return sum(schedule.numel for schedule in self.schedules.values())
