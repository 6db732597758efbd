import pytest
import torch

from megarl.weights.boxes import Rectangle, contiguous_blocks, range_rectangles, tiling_fault


def test_intersect_and_move() -> None:
    a, b = Rectangle((0, 2), (4, 6)), Rectangle((3, 0), (9, 3))
    assert a.intersect(b) == Rectangle((3, 2), (4, 3))
    assert a.intersect(Rectangle((4, 0), (5, 9))) is None  # they only touch
    assert Rectangle((3, 2), (4, 3)).relative_to((3, 0), (10, 20)) == Rectangle((10, 22), (11, 23))
    assert Rectangle((1, 2), (4, 3)).volume == 3


def test_tiling_fault_finds_missing_doubled_and_outside() -> None:
    top, bottom = Rectangle((0, 0), (2, 3)), Rectangle((2, 0), (4, 3))
    assert tiling_fault((4, 3), [top, bottom]) is None
    assert tiling_fault((4, 3), [top]) == "6 of 12 elements are missing"
    assert tiling_fault((4, 3), [top, bottom, Rectangle((1, 1), (3, 2))]) == "[1:2, 1:2] comes twice"
    assert tiling_fault((4, 3), [top, Rectangle((2, 0), (5, 3))]) == "[2:5, 0:3] lies outside shape (4, 3)"
    # The right volume is not enough: one element too often and one missing.
    assert tiling_fault((2,), [Rectangle((0,), (1,)), Rectangle((0,), (1,))]) == "[0:1] comes twice"


def test_blocks_are_contiguous_bounded_and_cover() -> None:
    for shape in [(7,), (5, 6), (1, 4, 6), (3, 4, 5)]:
        tensor = torch.arange(torch.Size(shape).numel()).view(shape)
        for max_volume in (1, 3, 7, 20, 1000):
            parts = []
            for offset, block in contiguous_blocks(shape, max_volume):
                assert 0 < block.volume <= max_volume
                values = tensor[block.slices].reshape(-1)
                assert values[0] == offset
                parts.append(values)
            assert torch.equal(torch.cat(parts), tensor.view(-1))


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (1, 6), (3, 4, 5), (2, 1, 3, 2)])
def test_ranges_are_contiguous_rectangles_in_order(shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    tensor = torch.arange(numel).view(shape)
    for start in range(numel):
        for stop in range(start, numel + 1):
            rectangles = list(range_rectangles(shape, start, stop))
            assert len(rectangles) <= max(1, 2 * len(shape) - 1)
            values = [tensor[rectangle.slices].reshape(-1) for rectangle in rectangles]
            assert torch.equal(torch.cat(values) if values else tensor.new_empty(0), torch.arange(start, stop))
