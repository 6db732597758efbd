"""Describe the tensors of a model, slices of them, and the schedules in which slices are sent.

A slice is a hyperrectangle of a tensor; a chunk is a range of consecutive elements in row-major order. Every
shard that Megatron makes of a Hugging Face tensor is a single slice once both tensors are seen through a
suitable view. Functions prove that a set of slices covers a tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from operator import sub
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from megarl.machine.errors import counted

if TYPE_CHECKING:  # planning must not import torch
    import torch


class WeightTransferError(ValueError):
    """A tensor is missing, unexpected, duplicated or of the wrong shape. The message names it."""


@dataclass(frozen=True)
class TensorMeta:
    shape: tuple[int, ...]
    dtype: torch.dtype


# Hugging Face name -> shape and dtype, for every tensor of a model
Manifest = Mapping[str, TensorMeta]


class WeightReceipt:
    """Tracks which elements have arrived, to check that a load is complete against a manifest.

    receipt = WeightReceipt(manifest)
    receipt.record(name, start, stop, dtype)  # in any order
    receipt.close()
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._arrived: dict[str, list[tuple[int, int]]] = {}

    def record(self, name: str, start: int, stop: int, dtype: torch.dtype) -> None:
        """Record the arrival of elements start <= i < stop of a row-major tensor.

        Raises:
            WeightTransferError: The name is unknown, the dtype is wrong, or elements lie outside the tensor.
        """
        meta = self.manifest.get(name)
        if meta is None:
            raise WeightTransferError(f"tensor {name!r} is not in the model's manifest")

        if dtype != meta.dtype:
            raise WeightTransferError(
                f"tensor {name!r} arrived as {dtype}, but the manifest specifies {meta.dtype}"
            )

        if start < 0 or stop > prod(meta.shape):
            raise WeightTransferError(
                f"tensor {name!r}: elements {start}..{stop} lie outside shape {meta.shape}"
            )

        self._arrived.setdefault(name, []).append((start, stop))

    def close(self) -> None:
        """Check that every element of the manifest arrived exactly once.

        Raises:
            WeightTransferError: An element is missing or arrived twice; the message names the tensors.
        """
        wrong = []
        for name, meta in self.manifest.items():
            position = 0
            # In element order, each chunk must begin where the previous one ended.
            for start, end in sorted(self._arrived.get(name, [])):
                if start != position:
                    wrong.append(
                        f"{name} ({'twice' if start < position else 'missing'} at element "
                        f"{min(start, position)})"
                    )
                    break
                position = end
            else:
                if position != prod(meta.shape):
                    wrong.append(f"{name} (missing from element {position} of {prod(meta.shape)})")

        if wrong:
            raise WeightTransferError(
                f"{counted(len(wrong), 'tensor')} incomplete or duplicated: " + ", ".join(wrong[:8])
            )


@dataclass(frozen=True)
class TensorSlice:
    """The elements with starts[d] <= index[d] < stops[d] in every dimension d."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> TensorSlice:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stops, self.starts))

    @property
    def volume(self) -> int:
        return prod(map(sub, self.stops, self.starts))  # planning reads it about 100,000 times

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.starts, self.stops, strict=True))

    def along(self, dim: int, start: int, stop: int) -> TensorSlice:
        """Return this slice with its extent in one dimension replaced."""
        return TensorSlice(
            (*self.starts[:dim], start, *self.starts[dim + 1 :]),
            (*self.stops[:dim], stop, *self.stops[dim + 1 :]),
        )

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return TensorSlice(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def relative_to(self, origin: Sequence[int], target: Sequence[int] | None = None) -> TensorSlice:
        """Translate the slice so that the point `origin` maps to `target` (default: the zero point)."""
        shift = [to - at for at, to in zip(origin, target or (0,) * len(origin), strict=True)]
        return TensorSlice(
            tuple(map(int.__add__, self.starts, shift)), tuple(map(int.__add__, self.stops, shift))
        )

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{start}:{stop}" for start, stop in zip(self.starts, self.stops, strict=True))
            + "]"
        )


def tiling_fault(shape: Sequence[int], tensor_slices: Sequence[TensorSlice]) -> str | None:
    """Return None if slices cover every element of `shape` exactly once, and otherwise the fault.

    No element is visited: slices that lie inside the shape, do not overlap, and add up to its volume tile it
    exactly.
    """
    whole = TensorSlice.whole(shape)
    for index, tensor_slice in enumerate(tensor_slices):
        if tensor_slice.intersect(whole) != tensor_slice:
            return f"{tensor_slice} lies outside shape {tuple(shape)}"
        for other in tensor_slices[:index]:
            if (overlap := tensor_slice.intersect(other)) is not None:
                return f"{overlap} is covered twice"

    missing = whole.volume - sum(tensor_slice.volume for tensor_slice in tensor_slices)
    return f"{missing} of {whole.volume} elements are missing" if missing else None


def chunks_fault(shape: Sequence[int], slices: Sequence[TensorSlice]) -> str | None:
    """Check a tiling like `tiling_fault`, but fast for thousands of slices.

    Slices with the same extent along the first dimension form one group (a layer).
    """
    if not prod(shape):
        return None
    groups: dict[tuple[int, int], list[TensorSlice]] = defaultdict(list)

    # Group the slices by their extent along the first dimension.
    for tensor_slice in slices:
        if len(tensor_slice.starts) != len(shape):
            return f"{tensor_slice} has a different number of dimensions than {tuple(shape)}"
        if shape:
            groups[tensor_slice.starts[0], tensor_slice.stops[0]].append(
                TensorSlice(tensor_slice.starts[1:], tensor_slice.stops[1:])
            )

    spans = [TensorSlice((start,), (stop,)) for start, stop in sorted(groups)]
    # Groups that overlap along the first dimension can only be checked slice by slice.
    if not shape or any(
        left.stops[0] > right.starts[0] for left, right in zip(spans, spans[1:], strict=False)
    ):
        return tiling_fault(shape, slices)

    if (fault := tiling_fault(shape[:1], spans)) is not None:
        return f"along the first dimension: {fault}"
    if len(shape) == 1:
        return next(
            (f"[{span[0]}:{span[1]}] occurs twice" for span, inner in groups.items() if len(inner) > 1), None
        )

    # Each group must tile the remaining dimensions.
    for (start, stop), inner in groups.items():
        if (fault := chunks_fault(shape[1:], inner)) is not None:
            return f"at {start}:{stop} of the first dimension, {fault}"

    return None


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def flat_index(index: Sequence[int], strides: Sequence[int]) -> int:
    """Return the flat position of the element `index` in memory with these strides, in elements."""
    return sum(map(int.__mul__, index, strides))


def contiguous_blocks(shape: Sequence[int], max_volume: int) -> Iterator[tuple[int, TensorSlice]]:
    """Split a row-major tensor into slices of at most `max_volume` elements, each contiguous in memory.

    Args:
        shape: The shape of the tensor.
        max_volume: At least 1.

    Yields:
        The offset of the first element and the slice, in memory order.
    """
    inner_volumes = row_major_strides(shape)

    # Split along the outermost dimension of which one row fits into a block.
    cut_dim = next(dim for dim, inner in enumerate(inner_volumes) if inner <= max_volume)
    step = max_volume // inner_volumes[cut_dim]

    for outer in product(*(range(size) for size in shape[:cut_dim])):
        for start in range(0, shape[cut_dim], step):
            starts = (*outer, start) + (0,) * (len(shape) - cut_dim - 1)
            stops = (
                *(index + 1 for index in outer),
                min(start + step, shape[cut_dim]),
                *shape[cut_dim + 1 :],
            )
            yield flat_index(starts, inner_volumes), TensorSlice(starts, stops)


def range_slices(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorSlice]:
    """Yield the elements start <= i < stop of a row-major tensor as the fewest contiguous slices.

    The slices come in memory order, at most two per dimension. Requires 0 <= start <= stop <= numel.
    """
    if start >= stop:
        return
    inner = prod(shape[1:])

    if not shape or inner == 0:
        yield TensorSlice.whole(shape)
        return

    # The rest of the first row, then whole rows, then the beginning of the last row.
    first_whole = -(-start // inner)
    last_whole = stop // inner

    if first_whole > last_whole:  # the range lies inside one row
        yield from _in_row(shape, start // inner, start % inner, stop - start // inner * inner)
        return

    yield from _in_row(shape, start // inner, start % inner, inner) if start % inner else ()
    if first_whole < last_whole:
        yield TensorSlice.whole(shape).along(0, first_whole, last_whole)
    yield from _in_row(shape, last_whole, 0, stop % inner)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[TensorSlice]:
    for inner in range_slices(shape[1:], start, stop):
        yield TensorSlice((row, *inner.starts), (row + 1, *inner.stops))


# ---- schedules

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
        """Yield the parts of a received round in a flat buffer with their elements, shaped like the slice."""
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
