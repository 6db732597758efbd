"""Test in which snapshots a rank with another layout finds its tensors."""

from __future__ import annotations

import pytest

from megarl.checkpoints.snapshot_file import SnapshotIndex, SnapshotSlices, SnapshotTensor, WantedTensor
from megarl.weights.tensors import TensorSlice


def slice_of(start: int, stop: int) -> TensorSlice:
    """Rows of a (8, 2) tensor."""
    return TensorSlice((start, 0), (stop, 2))


def index(*tensors: tuple[str, TensorSlice, bool]) -> SnapshotIndex:
    return tuple(SnapshotTensor(key, place, is_main, "float32", nbytes=0) for key, place, is_main in tensors)


WHOLE = slice_of(0, 8)
# Two tensor-parallel ranks with rows 0..4 and 4..8 of the weight, times two replicas. The norm is whole on each
# rank; checkpoints take it from the first of two tensor-parallel ranks.
INDEXES = {
    f"rank-{replica}-{half}": index(
        ("weight", slice_of(4 * half, 4 * half + 4), True),
        ("norm", WHOLE, half == 0),
        ("moment", slice_of(4 * half + 2 * replica, 4 * half + 2 * replica + 2), True),
    )
    for replica in (0, 1)
    for half in (0, 1)
}


def wanted(key: str, place: TensorSlice) -> WantedTensor:
    return (key, (8, 2), place, False)


@pytest.mark.parametrize(
    ("key", "place", "near", "found"),
    [
        ("weight", WHOLE, (), {"rank-0-0": [0], "rank-0-1": [0]}),
        ("weight", WHOLE, ("rank-1-1",), {"rank-0-0": [0], "rank-1-1": [0]}),
        ("weight", slice_of(5, 6), ("rank-1-1", "rank-1-0"), {"rank-1-1": [0]}),
        ("norm", WHOLE, ("rank-0-1",), {"rank-0-0": [1]}),
        ("moment", slice_of(3, 5), (), {"rank-1-0": [2], "rank-0-1": [2]}),
        ("moment", WHOLE, (), {name: [2] for name in INDEXES}),
    ],
)
def test_each_element_is_found_once(
    key: str, place: TensorSlice, near: tuple[str, ...], found: dict[str, list[int]]
) -> None:
    assert SnapshotSlices(INDEXES).sources([wanted(key, place)], near) == found


def test_slices_are_found_by_layer_and_row() -> None:
    """A tensor of shape (2, 4, 2), each row of which is in a snapshot of its own, and a vector."""
    rows = {
        f"rank-{layer}-{row}": index(
            ("weight", TensorSlice((layer, row, 0), (layer + 1, row + 1, 2)), True),
            ("scale", TensorSlice((layer,), (layer + 1,)), row == 0),
        )
        for layer in (0, 1)
        for row in range(4)
    }
    slices = SnapshotSlices(rows)
    of_layer = ("weight", (2, 4, 2), TensorSlice((1, 1, 1), (2, 3, 2)), False)
    of_both = ("weight", (2, 4, 2), TensorSlice((0, 3, 0), (2, 4, 1)), False)
    scale = ("scale", (2,), TensorSlice((1,), (2,)), False)
    assert slices.sources([of_layer], ()) == {"rank-1-1": [0], "rank-1-2": [0]}
    assert slices.sources([of_both, scale], ()) == {"rank-0-3": [0], "rank-1-3": [0], "rank-1-0": [1]}


def test_padding_of_the_vocabulary_may_differ() -> None:
    slices = SnapshotSlices({"rank": index(("embedding", slice_of(0, 6), True))})
    padded = ("embedding", (8, 2), slice_of(4, 8), True)
    assert slices.sources([padded], ()) == {"rank": [0]}
    assert slices.sources([("embedding", (8, 2), slice_of(6, 8), True)], ()) == {}
