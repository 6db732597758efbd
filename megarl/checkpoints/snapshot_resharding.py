"""Find in which snapshots of other ranks a rank with another layout finds its tensors.

As in a checkpoint, each tensor of the model is described by its name and slices of the whole tensor, whatever
the layout. Among the ranks that hold the same elements, those that would write them into a checkpoint cover
each tensor once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

from megarl.checkpoints.snapshot_file import SnapshotIndex
from megarl.weights.tensors import TensorSlice, chunks_fault

# A slice of a checkpoint tensor that a rank needs: the name of the tensor; the shape of the whole tensor in
# this layout; the slice; and whether rows at the end may only pad the vocabulary, so that their number
# depends on the layout.
WantedTensor = tuple[str, tuple[int, ...], TensorSlice, bool]
# Places of a slice in the snapshots of several ranks: (name of the file, number in its index).
_Copies = list[tuple[str, int]]


class _SlicedTensor:
    """The slices of one tensor, in which those that meet another slice are found without looking at all.

    Megatron prepends axes, such as the layer axis, along which each slice has length 1. Slices with the same
    indices along them are sorted by their first index along the next axis.

    Args:
        key: The name of the tensor.
        slices: Its slices, which cover it once, and their copies.
    """

    def __init__(self, key: str, slices: Mapping[TensorSlice, _Copies]) -> None:
        self.shape = tuple(map(max, zip(*(place.stops for place in slices), strict=True)))
        fault = chunks_fault(self.shape, list(slices))
        assert fault is None, f"the snapshots do not have each element of {key} once: {fault}"
        lengths = list(zip(*(place.shape for place in slices), strict=True))
        last = len(lengths) - 1
        # Slices are found by bisection along the first axis on which one of them is longer than 1.
        self._axis = next((axis for axis in range(last) if max(lengths[axis]) > 1), last)
        self._longest = max(lengths[self._axis])
        self._copies = slices
        self._groups: dict[Sequence[int], list[TensorSlice]] = defaultdict(list)
        for place in sorted(slices, key=lambda place: place.starts):
            self._groups[place.starts[: self._axis]].append(place)

    def meeting(self, place: TensorSlice) -> Iterator[_Copies]:
        """Yield the copies of each slice that has elements of a slice."""
        axis = self._axis
        # A slice that starts earlier ends before the place.
        first_start = place.starts[axis] - self._longest + 1
        for indices in product(*map(range, place.starts[:axis], place.stops[:axis])):
            group = self._groups.get(indices, [])
            first = bisect_left(group, first_start, key=lambda each: each.starts[axis])
            last = bisect_left(group, place.stops[axis], key=lambda each: each.starts[axis])
            yield from (self._copies[each] for each in group[first:last] if each.intersect(place) is not None)


class SnapshotSlices:
    """All slices that the snapshots of one model have.

    Args:
        indexes: The indexes of the snapshots of all its ranks, by file name.
    """

    def __init__(self, indexes: Mapping[str, SnapshotIndex]) -> None:
        copies: dict[str, dict[TensorSlice, _Copies]] = defaultdict(dict)
        for name, index in indexes.items():
            for number, tensor in enumerate(index.tensors):
                if tensor.is_main:
                    copies[tensor.key].setdefault(tensor.place, []).append((name, number))

        self._tensors = {key: _SlicedTensor(key, of_key) for key, of_key in copies.items()}

    def sources(self, wanted: Iterable[WantedTensor], near: Collection[str]) -> dict[str, list[int]]:
        """Return which tensors of which files have the elements that a rank needs, each element once.

        Args:
            wanted: What the rank needs.
            near: Names of the files on the rank's node, which are preferred.

        Returns:
            The numbers of tensors in the index of each file, in order.
        """
        chosen: dict[str, set[int]] = defaultdict(set)
        for key, shape, place, is_padded in wanted:
            self._check_shape(key, shape, is_padded)
            for copies in self._tensors[key].meeting(place):
                name, number = min(copies, key=lambda entry: entry[0] not in near)
                chosen[name].add(number)
        return {name: sorted(numbers) for name, numbers in chosen.items()}

    def _check_shape(self, key: str, shape: tuple[int, ...], is_padded: bool) -> None:
        assert key in self._tensors, f"the snapshots have no tensor {key}"
        stored = self._tensors[key].shape
        assert stored[is_padded:] == shape[is_padded:], (
            f"{key} has shape {stored} in the snapshots, but this model needs {shape}"
        )
