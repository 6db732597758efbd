"""Describe the tensors of a model and slices of them, and prove that a set of slices covers a tensor.

A slice is a hyperrectangle of a tensor; a chunk is a range of consecutive elements in row-major order. Every
shard that Megatron makes of a Hugging Face tensor is a single slice once both tensors are seen through a
suitable view.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import sub
from typing import TYPE_CHECKING

from megarl.machine.wording import counted

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
