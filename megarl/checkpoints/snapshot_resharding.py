"""Find in which snapshots of other ranks a rank with another layout finds its tensors.

As in a checkpoint, each tensor of the model is described by its name and slices of the whole tensor, whatever
the layout. Among the ranks that hold the same elements, those that would write them into a checkpoint cover
each tensor once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from megarl.checkpoints.memory_snapshot import SnapshotIndex
from megarl.weights.tensors import TensorSlice, chunks_fault


class WantedTensor(NamedTuple):
    """A slice of a checkpoint tensor that a rank needs.

    Attributes:
        key: The name of the checkpoint tensor.
        shape: The shape of the whole checkpoint tensor in this layout.
        place: The slice.
        is_padded: Whether rows at the end may only pad the vocabulary, so that their number depends on the
            layout.
    """

    key: str
    shape: tuple[int, ...]
    place: TensorSlice
    is_padded: bool


class _Copies(NamedTuple):
    """The same slice in the snapshots of several ranks: (name of the file, number in its index)."""

    place: TensorSlice
    entries: list[tuple[str, int]]


class StoredSlices:
    """All slices that the snapshots of one model have.

    Args:
        indexes: The indexes of the snapshots of all its ranks, by file name.
    """

    def __init__(self, indexes: Mapping[str, SnapshotIndex]) -> None:
        copies: dict[str, dict[TensorSlice, _Copies]] = defaultdict(dict)
        for name, index in indexes.items():
            for number, tensor in enumerate(index.tensors):
                if tensor.is_main:
                    of_slice = copies[tensor.key].setdefault(tensor.place, _Copies(tensor.place, []))
                    of_slice.entries.append((name, number))

        # Sorted by their first index, so that those which meet a slice are found without looking at all.
        self._slices = {
            key: sorted(of_key.values(), key=lambda each: each.place.starts) for key, of_key in copies.items()
        }
        self._longest = {
            key: max(each.place.stops[0] - each.place.starts[0] for each in slices)
            for key, slices in self._slices.items()
        }
        self._shapes = {
            key: tuple(map(max, zip(*(each.place.stops for each in slices), strict=True)))
            for key, slices in self._slices.items()
        }
        for key, slices in self._slices.items():
            fault = chunks_fault(self._shapes[key], [each.place for each in slices])
            assert fault is None, f"the snapshots do not have each element of {key} once: {fault}"

    def sources(self, wanted: Iterable[WantedTensor], near: Collection[str]) -> dict[str, list[int]]:
        """Return which tensors of which files have the elements that a rank needs, each element once.

        Args:
            wanted: What the rank needs.
            near: Names of the files on the rank's node, which are preferred.

        Returns:
            The numbers of tensors in the index of each file, in order.
        """
        chosen: dict[str, set[int]] = defaultdict(set)
        for each in wanted:
            self._check_shape(each)
            for copies in self._meeting(each):
                name, number = min(copies.entries, key=lambda entry: entry[0] not in near)
                chosen[name].add(number)
        return {name: sorted(numbers) for name, numbers in chosen.items()}

    def _check_shape(self, wanted: WantedTensor) -> None:
        stored = self._shapes.get(wanted.key)
        assert stored is not None, f"the snapshots have no tensor {wanted.key}"
        assert stored[wanted.is_padded :] == wanted.shape[wanted.is_padded :], (
            f"{wanted.key} has shape {stored} in the snapshots, but this model needs {wanted.shape}"
        )

    def _meeting(self, wanted: WantedTensor) -> Iterator[_Copies]:
        slices = self._slices[wanted.key]
        begin = (wanted.place.starts[0] - self._longest[wanted.key] + 1,)
        first = bisect_left(slices, begin, key=lambda each: each.place.starts)
        last = bisect_left(slices, (wanted.place.stops[0],), key=lambda each: each.place.starts)
        yield from (each for each in slices[first:last] if each.place.intersect(wanted.place) is not None)
