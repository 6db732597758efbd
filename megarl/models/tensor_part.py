"""Parts of Hugging Face tensors: a slice of a tensor, seen through a view, with its axes in another order.

Most rows of the tensor table consist of whole tensors. A `TensorPart` describes the others, such as one
expert of a tensor that holds all experts, or the query rows of a projection that also holds gates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

SECTIONS_AXIS = "P"  # the axis of a part that consists of sections
EXPERT_AXIS = "E"  # in rows of experts, the axis from which an expert takes its own element
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A slice of a Hugging Face tensor, with its axes in another order.

    Axes are letters of the table or numbers. In `dims`, parentheses contain the axes into which the view
    splits one stored axis: "E H (M 2)" is a tensor (E, H, 2M) whose last axis alternates between two things.

    Attributes:
        name: The Hugging Face name.
        dims: The axes of the view of the stored tensor. `E` is indexed by the expert in rows of experts.
        sections: The sizes of the sections that the axis `P` consists of, as products of axes: "M" or "2 D".
        order: The axes that remain, in the order of the parameter. Parentheses merge axes. None: as stored.
    """

    name: str
    dims: str
    sections: tuple[str, ...] = ()
    section: int = 0
    order: str | None = None

    @property
    def takes_expert(self) -> bool:
        """Whether the tensor has an axis of experts."""
        return EXPERT_AXIS in self.dims.replace("(", " ").replace(")", " ").split()


class Rearrangement(NamedTuple):
    """The order in which the axes of a view lie in a parameter.

    Attributes:
        order: The axes of the view in the order of the parameter. Axes of which a single element is taken
            come first.
        num_merged: For each axis of the block, the number of axes of `order` that it consists of.
    """

    order: tuple[int, ...]
    num_merged: tuple[int, ...]

    def sizes_by_axis(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return, for each axis of the block, the sizes of its axes, for a slice of the view of `shape`."""
        position = len(self.order) - sum(self.num_merged)
        sizes = []
        for count in self.num_merged:
            sizes.append(tuple(shape[axis] for axis in self.order[position : position + count]))
            position += count
        return sizes


class PartGeometry(NamedTuple):
    """A part with numbers.

    Attributes:
        shape: The shape of the stored tensor.
        view: The row-major view of the stored tensor.
        starts: The first element of the slice in each axis of the view.
        stops: The end of the slice in each axis of the view.
        rearrangement: How the axes of the view lie in the parameter.
        block: The shape of the slice in the parameter.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    rearrangement: Rearrangement
    block: tuple[int, ...]


def size_of(axes: str, sizes: Mapping[str, int]) -> int:
    """Return the product of axes such as "M", "2 D" or "1 H"."""
    return prod(int(axis) if axis.isdigit() else sizes[axis] for axis in axes.split())


def part_geometry(part: TensorPart, sizes: Mapping[str, int], expert: int | None) -> PartGeometry:
    """Return the numbers of a part.

    Args:
        expert: The number of the expert in a row of experts, otherwise None.

    Raises:
        ValueError: `order` does not consist of the axes that remain.
    """
    groups = _axes(part.dims)
    axes = [axis for group in groups for axis in group]
    bounds = [_bounds(axis, part, sizes, expert) for axis in axes]
    lengths = iter([_length(axis, part, sizes) for axis in axes])
    view_groups = [tuple(next(lengths) for _ in group) for group in groups]

    # An axis from which an expert takes one element does not exist in the parameter.
    is_taken = [axis == EXPERT_AXIS and expert is not None for axis in axes]
    merged = _remaining(groups, is_taken) if part.order is None else _axes(part.order)
    taken = [number for number, taken in enumerate(is_taken) if taken]
    free = [number for number, taken in enumerate(is_taken) if not taken]
    order = []

    for axis in (axis for group in merged for axis in group):
        number = next((number for number in free if axes[number] == axis), None)
        if number is None:
            raise ValueError(f"{part.name}: {part.dims!r} lacks axis {axis!r} of order {part.order!r}")
        free.remove(number)
        order.append(number)

    if free:
        raise ValueError(f"{part.name}: order {part.order!r} lacks axis {axes[free[0]]!r} of {part.dims!r}")

    rearrangement = Rearrangement((*taken, *order), tuple(map(len, merged)))
    extents = tuple(stop - start for start, stop in bounds)
    return PartGeometry(
        shape=tuple(map(prod, view_groups)),
        view=tuple(size for group in view_groups for size in group),
        starts=tuple(start for start, _ in bounds),
        stops=tuple(stop for _, stop in bounds),
        rearrangement=rearrangement,
        block=tuple(map(prod, rearrangement.sizes_by_axis(extents))),
    )


def _axes(dims: str) -> list[list[str]]:
    """Split "E H (M 2)" into [["E"], ["H"], ["M", "2"]]."""
    return [(inner or single).split() for inner, single in _AXIS.findall(dims)]


def _remaining(groups: list[list[str]], is_taken: list[bool]) -> list[list[str]]:
    taken = iter(is_taken)
    kept = [[axis for axis in group if not next(taken)] for group in groups]
    return [group for group in kept if group]


def _length(axis: str, part: TensorPart, sizes: Mapping[str, int]) -> int:
    if axis == SECTIONS_AXIS and part.sections:
        return sum(size_of(section, sizes) for section in part.sections)
    return size_of(axis, sizes)


def _bounds(axis: str, part: TensorPart, sizes: Mapping[str, int], expert: int | None) -> tuple[int, int]:
    if axis == EXPERT_AXIS and expert is not None:
        return expert, expert + 1

    if axis == SECTIONS_AXIS and part.sections:
        ends = [size_of(section, sizes) for section in part.sections]
        start = sum(ends[: part.section])
        return start, start + ends[part.section]

    return 0, size_of(axis, sizes)
