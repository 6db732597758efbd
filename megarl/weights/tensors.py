"""The tensors of a model, their pieces, and the proof that pieces make them whole. A piece is a chunk of
consecutive elements or a slice.

Every cut that Megatron makes of a Hugging Face tensor is one slice, once both tensors are seen through the
right view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # plans are made without it
    import torch


class ChunkMeta(NamedTuple):
    """Elements [offset, offset + numel) of the row-major Hugging Face tensor `name`."""

    name: str
    offset: int
    numel: int


class WeightTransferError(ValueError):
    """A tensor is missing, extra, doubled or wrongly shaped; the message names it."""


@dataclass(frozen=True)
class TensorMeta:
    shape: tuple[int, ...]
    dtype: torch.dtype


Manifest = Mapping[str, TensorMeta]  # Hugging Face name -> shape and dtype, of every tensor of a model


@dataclass
class WeightReceipt:
    """Counts what has arrived against a manifest, so that a load is complete or an error."""

    manifest: Manifest
    _arrived: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def record(self, chunk: ChunkMeta, dtype: torch.dtype) -> None:
        """Raises WeightTransferError for an unknown name, a wrong dtype, or elements outside the tensor."""
        meta = self.manifest.get(chunk.name)
        if meta is None:
            raise WeightTransferError(f"tensor {chunk.name!r} is not in the model's manifest")

        if dtype != meta.dtype:
            raise WeightTransferError(
                f"tensor {chunk.name!r} arrived as {dtype}, the manifest says {meta.dtype}"
            )

        end = chunk.offset + chunk.numel
        if chunk.offset < 0 or end > prod(meta.shape):
            raise WeightTransferError(
                f"tensor {chunk.name!r}: elements {chunk.offset}..{end} lie outside shape {meta.shape}"
            )

        self._arrived.setdefault(chunk.name, []).append((chunk.offset, end))

    def close(self) -> None:
        """Raises WeightTransferError that names the tensors of which an element is missing or came twice."""
        wrong = []
        for name, meta in self.manifest.items():
            position = 0
            # In the order of elements, each chunk must begin where the previous one ended.
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
            raise WeightTransferError(f"{len(wrong)} tensors incomplete or doubled: " + ", ".join(wrong[:8]))


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
        return prod(map(sub, self.stops, self.starts))  # a plan asks it a hundred thousand times

    @property
    def index(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.starts, self.stops, strict=True))

    def along(self, dim: int, start: int, stop: int) -> TensorSlice:
        """Returns this slice with its extent in one dimension replaced."""
        return TensorSlice(
            (*self.starts[:dim], start, *self.starts[dim + 1 :]),
            (*self.stops[:dim], stop, *self.stops[dim + 1 :]),
        )

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return TensorSlice(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def relative_to(self, origin: Sequence[int], target: Sequence[int] | None = None) -> TensorSlice:
        """Moved so that the point `origin` comes to lie on `target` (the zero point if not given)."""
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
    """Returns None if the slices cover every element of `shape` exactly once, and otherwise what is wrong, in
    words.

    Slices that lie inside, do not meet, and have the right total volume tile exactly: no element is looked
    at.
    """
    whole = TensorSlice.whole(shape)
    for index, tensor_slice in enumerate(tensor_slices):
        if tensor_slice.intersect(whole) != tensor_slice:
            return f"{tensor_slice} lies outside shape {tuple(shape)}"
        for other in tensor_slices[:index]:
            if (overlap := tensor_slice.intersect(other)) is not None:
                return f"{overlap} comes twice"

    missing = whole.volume - sum(tensor_slice.volume for tensor_slice in tensor_slices)
    return f"{missing} of {whole.volume} elements are missing" if missing else None


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """In elements, of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def flat_index(index: Sequence[int], strides: Sequence[int]) -> int:
    """Of the element `index`, in memory with such strides."""
    return sum(map(int.__mul__, index, strides))


def contiguous_blocks(shape: Sequence[int], max_volume: int) -> Iterator[tuple[int, TensorSlice]]:
    """Cuts a row-major tensor into slices of at most `max_volume` elements, each contiguous in memory.

    Yields (offset of the first element, slice) in the order of memory. max_volume >= 1.
    """
    inner_volumes = row_major_strides(shape)

    # Cut along the outermost dimension of which one row fits into a block.
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
    """The elements start <= i < stop of a row-major tensor as the fewest slices that are contiguous in
    memory, in their order.

    At most two for each dimension. 0 <= start <= stop <= the number of elements.
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

    if first_whole > last_whole:  # inside one row
        yield from _in_row(shape, start // inner, start % inner, stop - start // inner * inner)
        return

    yield from _in_row(shape, start // inner, start % inner, inner) if start % inner else ()
    if first_whole < last_whole:
        yield TensorSlice.whole(shape).along(0, first_whole, last_whole)
    yield from _in_row(shape, last_whole, 0, stop % inner)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[TensorSlice]:
    for inner in range_slices(shape[1:], start, stop):
        yield TensorSlice((row, *inner.starts), (row + 1, *inner.stops))
