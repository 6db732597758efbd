"""A piece: a slice of a Hugging Face tensor, and the slice of a rank's parameter that contains it.

Three coordinate systems describe a tensor: its own shape, in which ranks exchange slices; its view, which
splits axes so that every piece is a slice; and the shard, in which the axes of a piece may be merged and in
another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from megarl.models.mapping import Rearrangement
from megarl.weights.tensors import TensorSlice, flat_index, range_slices, row_major_strides

if TYPE_CHECKING:  # planning must not import torch
    import torch


@dataclass(frozen=True)
class Piece:
    """A slice of a Hugging Face tensor, and the slice of the shard that contains its elements.

    Attributes:
        hf_name: The name of the Hugging Face tensor.
        hf_view: The row-major view of the whole tensor that `hf` refers to.
        hf: The slice of the tensor.
        shard_view: The row-major view of the rank's parameter that `shard` refers to.
        shard: The slice of the parameter.
        is_source: Whether these elements are gathered from this rank, among all ranks that hold them.
        rearrangement: How the axes of `hf` lie in `shard`. None: both have the same shape.
    """

    hf_name: str
    hf_view: tuple[int, ...]
    hf: TensorSlice
    shard_view: tuple[int, ...]
    shard: TensorSlice
    is_source: bool
    rearrangement: Rearrangement | None = None

    def matches(self, shard: TensorSlice) -> Iterator[tuple[TensorSlice, TensorSlice]]:
        """Split a slice of `self.shard` into slices that are slices of the tensor's view as well.

        Yields:
            Slices of the shard, and the slices of the view with the same elements.
        """
        if self.rearrangement is None:
            yield shard, shard.relative_to(self.shard.starts, self.hf.starts)
            return

        inside = shard.relative_to(self.shard.starts)
        for blocks, hf in rearranged_slices(self.rearrangement, self.hf, inside):
            yield blocks.relative_to((0,) * len(blocks.starts), self.shard.starts), hf

    def in_hf_order(self, region: torch.Tensor, hf: TensorSlice | None = None) -> torch.Tensor:
        """View elements of the shard in the order of the tensor's view.

        Args:
            region: A slice of the parameter in `shard_view`: the elements of `hf`.
            hf: A slice of the tensor's view. None: `self.hf`.
        """
        if self.rearrangement is None:
            return region
        shape = (hf or self.hf).shape
        order = self.rearrangement.order
        inverse = sorted(range(len(order)), key=lambda axis: order[axis])
        return region.view([shape[axis] for axis in order]).permute(inverse)

    def in_shard_order(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elements of `hf` in the order and shape of `shard`."""
        if self.rearrangement is None:
            return values
        return values.permute(self.rearrangement.order).reshape(self.shard.shape)


def rearranged_slices(
    rearrangement: Rearrangement, hf: TensorSlice, block: TensorSlice
) -> Iterator[tuple[TensorSlice, TensorSlice]]:
    """Split a slice of a block into slices of the view.

    Args:
        rearrangement: How the axes of the view lie in the block.
        hf: The slice of the view that the whole block contains.
        block: The slice of the block. The block begins at the zero point.

    Yields:
        Slices of the block, and the slices of the view with the same elements.
    """
    sizes = rearrangement.sizes_by_axis(hf.shape)

    # A range of a merged axis consists of one or several slices of the axes that were merged.
    by_axis = [
        list(range_slices(axes, start, stop))
        for axes, start, stop in zip(sizes, block.starts, block.stops, strict=True)
    ]
    num_taken = len(rearrangement.order) - sum(rearrangement.num_merged)

    for chosen in product(*by_axis):
        first = [
            flat_index(each.starts, row_major_strides(axes)) for each, axes in zip(chosen, sizes, strict=True)
        ]
        ends = [start + each.volume for start, each in zip(first, chosen, strict=True)]
        starts = [0] * num_taken + [start for each in chosen for start in each.starts]
        stops = [1] * num_taken + [stop for each in chosen for stop in each.stops]

        # Return to the order of the view, in which the slice of the whole block begins at `hf`.
        in_view = {axis: position for position, axis in enumerate(rearrangement.order)}
        axes_of_view = range(len(hf.starts))
        yield (
            TensorSlice(tuple(first), tuple(ends)),
            TensorSlice(
                tuple(hf.starts[axis] + starts[in_view[axis]] for axis in axes_of_view),
                tuple(hf.starts[axis] + stops[in_view[axis]] for axis in axes_of_view),
            ),
        )


@lru_cache(maxsize=4096)
def axis_groups(shape: tuple[int, ...], view: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the axes of a view that each axis of the shape was split into."""
    groups = []
    axis = 0

    for size in shape:
        group = [axis]
        while prod(view[at] for at in group) != size:
            axis += 1
            group.append(axis)
        axis += 1
        groups.append(tuple(group))

    # Axes of size one may remain.
    if groups:
        groups[-1] = (*groups[-1], *range(axis, len(view)))

    return tuple(groups)


def enclosing_slice(
    tensor_slice: TensorSlice, view: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[TensorSlice, tuple[int, ...], tuple[slice, ...]]:
    """Find the smallest slice of a tensor of shape `shape` that contains a slice of its view `view`.

    Returns:
        The slice of the tensor, the view of its elements, and the slice of that view.
    """
    ranges = []
    inner_view = list(tensor_slice.shape)
    index = [slice(None)] * len(inner_view)

    for group in axis_groups(shape, view):
        # Axes of which the slice has one element need not be read completely.
        start = 0
        outer = 0
        while outer < len(group) - 1 and tensor_slice.shape[group[outer]] == 1:
            start = start * view[group[outer]] + tensor_slice.starts[group[outer]]
            outer += 1

        # The others are read completely, except the first of them.
        axis = group[outer]
        inner = group[outer + 1 :]
        stride = prod(view[each] for each in inner)
        start = (start * view[axis] + tensor_slice.starts[axis]) * stride
        ranges.append((start, start + tensor_slice.shape[axis] * stride))
        for each in inner:
            inner_view[each] = view[each]
            index[each] = tensor_slice.index[each]

    part = TensorSlice(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))
    return part, tuple(inner_view), tuple(index)


def in_shape(
    tensor_slice: TensorSlice, shape: tuple[int, ...], view: tuple[int, ...]
) -> tuple[TensorSlice, ...]:
    """Return a slice of the view as slices of the shape, in row-major order of their first elements."""
    if shape == view:
        return (tensor_slice,)

    ranges_by_axis = []
    for group in axis_groups(shape, view):
        starts = tuple(tensor_slice.starts[axis] for axis in group)
        stops = tuple(tensor_slice.stops[axis] for axis in group)
        ranges_by_axis.append(list(_ranges(tuple(view[axis] for axis in group), starts, stops)))

    return tuple(
        TensorSlice(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))
        for ranges in product(*ranges_by_axis)
    )


def _ranges(sizes: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the elements of a slice of a row-major tensor as the fewest ranges of flat indices."""
    # Axes of which the slice contains everything belong to the range of the axis before them.
    num_outer = len(sizes)
    while num_outer > 1 and stops[num_outer - 1] - starts[num_outer - 1] == sizes[num_outer - 1]:
        num_outer -= 1

    strides = row_major_strides(sizes)
    last = num_outer - 1
    length = (stops[last] - starts[last]) * strides[last]
    for outer in product(*(range(starts[axis], stops[axis]) for axis in range(last))):
        first = flat_index((*outer, starts[last]), strides[:num_outer])
        yield first, first + length


def in_view(
    tensor_slice: TensorSlice, shape: tuple[int, ...], view: tuple[int, ...]
) -> Iterator[TensorSlice]:
    """Yield the elements of a slice of the shape as slices of the view, in row-major order."""
    if shape == view:
        yield tensor_slice
        return

    slices_by_axis = [
        list(
            range_slices(
                tuple(view[axis] for axis in group), tensor_slice.starts[dim], tensor_slice.stops[dim]
            )
        )
        for dim, group in enumerate(axis_groups(shape, view))
    ]

    # If a later axis consists of several slices, every element of the axes before it is visited separately.
    last = max((dim for dim, slices in enumerate(slices_by_axis) if len(slices) > 1), default=0)
    for dim in range(last):
        slices_by_axis[dim] = [
            single
            for index in range(tensor_slice.starts[dim], tensor_slice.stops[dim])
            for single in range_slices(
                tuple(view[axis] for axis in axis_groups(shape, view)[dim]), index, index + 1
            )
        ]

    for chosen in product(*slices_by_axis):
        yield TensorSlice(
            tuple(start for each in chosen for start in each.starts),
            tuple(stop for each in chosen for stop in each.stops),
        )
