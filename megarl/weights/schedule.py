"""The schedule of what one rank sends to another, in rounds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from megarl.weights.tensors import TensorSlice, range_slices

_LARGE = 2**18  # parts with this many elements are sent separately, which is faster than copying them


class Part(NamedTuple):
    """A slice of the tensor `name`, or as much of it as fits in a message. Sent in row-major order."""

    name: str
    tensor_slice: TensorSlice


class TransferSchedule:
    """Everything that one rank sends to another, in order, over all rounds.

    Each round contains the same fraction of the elements. If `bounds` are given, round n contains elements
    bounds[n] to bounds[n + 1].
    """

    def __init__(
        self, parts: Sequence[Part], num_rounds: int = 1, bounds: Sequence[int] | None = None
    ) -> None:
        assert bounds is None or len(bounds) == num_rounds + 1
        self.parts = tuple(parts)
        self.num_rounds = num_rounds
        self.bounds = bounds
        self._ends = list(accumulate(part.tensor_slice.volume for part in parts))
        self._messages: dict[int, tuple[Part, ...]] = {}  # cached, because every weight sync needs them again

    @property
    def numel(self) -> int:
        return self._ends[-1] if self._ends else 0

    def after(self, first_round: int) -> TransferSchedule:
        """Return the schedule without the rounds before `first_round`."""
        starts = [self._span(number)[0] for number in range(first_round, self.num_rounds)]
        bounds = [*starts, self.numel]
        return TransferSchedule(
            list(self._parts_between(bounds[0], self.numel)),
            len(starts),
            [bound - bounds[0] for bound in bounds],
        )

    def length(self, number: int) -> int:
        """Return the number of elements in the message of a round."""
        start, stop = self._span(number)
        return stop - start

    def message(self, number: int) -> tuple[Part, ...]:
        """Return the parts in the message of a round."""
        if number not in self._messages:
            self._messages[number] = tuple(self._parts_between(*self._span(number)))
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

    def _span(self, number: int) -> tuple[int, int]:
        if self.bounds is not None:
            return self.bounds[number], self.bounds[number + 1]
        return self.numel * number // self.num_rounds, self.numel * (number + 1) // self.num_rounds


TransferSchedules = Mapping[int, TransferSchedule]  # by the rank on the other end
