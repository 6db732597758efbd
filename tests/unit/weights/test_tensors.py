"""A load is complete or raises an error that names the tensor; slices intersect, move and tile."""

import pytest
import torch

from megarl.weights.tensors import (
    TensorMeta,
    TensorSlice,
    WeightReceipt,
    WeightTransferError,
    contiguous_blocks,
    range_slices,
    tiling_fault,
)

MANIFEST = {"a": TensorMeta((2, 3), torch.float32), "b": TensorMeta((4,), torch.bfloat16)}
Arrival = tuple[str, int, int, torch.dtype]  # name, first element, stop, and dtype
A_HEAD = ("a", 0, 4, torch.float32)
A_TAIL = ("a", 4, 6, torch.float32)
B_WHOLE = ("b", 0, 4, torch.bfloat16)


def close_after(*chunks: Arrival) -> None:
    receipt = WeightReceipt(MANIFEST)
    for chunk in chunks:
        receipt.record(*chunk)
    receipt.close()


def test_a_complete_load_in_any_order_passes() -> None:
    close_after(A_TAIL, B_WHOLE, A_HEAD)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([A_HEAD, B_WHOLE], r"a \(missing from element 4 of 6\)"),
        ([A_TAIL, B_WHOLE], r"a \(missing at element 0\)"),
        ([A_HEAD, A_TAIL], r"b \(missing from element 0 of 4\)"),
        ([A_HEAD, A_HEAD, A_TAIL, B_WHOLE], r"a \(twice at element 0\)"),
        ([("c", 0, 1, torch.float32)], "'c' is not in the model's manifest"),
        (
            [("b", 0, 4, torch.float32)],
            "'b' arrived as torch.float32, but the manifest specifies torch.bfloat16",
        ),
        ([("a", 5, 7, torch.float32)], r"'a': elements 5..7 lie outside shape \(2, 3\)"),
    ],
)
def test_wrong_chunks_of_a_tensor_are_named(chunks: list[Arrival], message: str) -> None:
    with pytest.raises(WeightTransferError, match=message):
        close_after(*chunks)


def test_intersect_and_move() -> None:
    a = TensorSlice((0, 2), (4, 6))
    b = TensorSlice((3, 0), (9, 3))
    assert a.intersect(b) == TensorSlice((3, 2), (4, 3))
    assert a.intersect(TensorSlice((4, 0), (5, 9))) is None  # they only touch
    assert TensorSlice((3, 2), (4, 3)).relative_to((3, 0), (10, 20)) == TensorSlice((10, 22), (11, 23))
    assert TensorSlice((1, 2), (4, 3)).volume == 3


def test_tiling_fault_finds_missing_doubled_and_outside() -> None:
    top = TensorSlice((0, 0), (2, 3))
    bottom = TensorSlice((2, 0), (4, 3))
    assert tiling_fault((4, 3), [top, bottom]) is None
    assert tiling_fault((4, 3), [top]) == "6 of 12 elements are missing"
    assert tiling_fault((4, 3), [top, bottom, TensorSlice((1, 1), (3, 2))]) == "[1:2, 1:2] is covered twice"
    assert tiling_fault((4, 3), [top, TensorSlice((2, 0), (5, 3))]) == "[2:5, 0:3] lies outside shape (4, 3)"

    # The right volume is not enough: one element is covered twice and one is missing.
    assert tiling_fault((2,), [TensorSlice((0,), (1,)), TensorSlice((0,), (1,))]) == "[0:1] is covered twice"


def test_blocks_are_contiguous_bounded_and_cover() -> None:
    for shape in [(7,), (5, 6), (1, 4, 6), (3, 4, 5)]:
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        for max_volume in (1, 3, 7, 20, 1000):
            parts = []
            for offset, block in contiguous_blocks(shape, max_volume):
                assert 0 < block.volume <= max_volume
                values = tensor[block.index].reshape(-1)
                assert values[0] == offset
                parts.append(values)
            assert torch.equal(torch.cat(parts), tensor.view(-1))


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (1, 6), (3, 4, 5), (2, 1, 3, 2)])
def test_ranges_are_contiguous_rectangles_in_order(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    tensor = torch.arange(numel).view(shape)

    for start in range(numel):
        for stop in range(start, numel + 1):
            tensor_slices = list(range_slices(shape, start, stop))
            assert len(tensor_slices) <= max(1, 2 * len(shape) - 1)
            values = [tensor[tensor_slice.index].reshape(-1) for tensor_slice in tensor_slices]
            assert torch.equal(
                torch.cat(values) if values else tensor.new_empty(0), torch.arange(start, stop)
            )
