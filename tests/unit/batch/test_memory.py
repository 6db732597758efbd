"""The cache of large memory blocks: which blocks are reused, and when."""

from __future__ import annotations

import pytest
import torch

from megarl.batch.memory import KeptMemory, new_values

SIZE = 1000


def test_memory_is_lent_again_only_when_nobody_holds_it() -> None:
    memory = KeptMemory()
    lent = memory.lend(SIZE)
    lent[:] = 1
    row = torch.from_numpy(lent).view(torch.float32)[3:5]  # a row of the column outlives it
    place = lent.ctypes.data
    del lent
    other = memory.lend(SIZE)
    other[:] = 2
    assert row.view(torch.uint8).tolist() == [1] * 8
    del row
    assert memory.num_kept >= SIZE
    again = memory.lend(SIZE - 9)  # columns differ slightly between steps
    assert (again.ctypes.data, len(again), memory.num_kept) == (place, SIZE - 9, 0)


def test_no_more_is_kept_than_was_in_use_at_a_time() -> None:
    memory = KeptMemory()
    columns = [memory.lend(SIZE) for _ in range(4)]
    del columns[:]
    assert memory.num_kept >= 4 * SIZE
    larger = memory.lend(3 * SIZE)  # no kept block is large enough
    assert len(larger) == 3 * SIZE
    assert memory.num_kept <= SIZE * 9 // 8
    smaller = memory.lend(SIZE // 2)  # a kept block would be too large
    assert len(smaller) == SIZE // 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float64])
def test_large_memory_is_of_every_kind_that_torch_has(dtype: torch.dtype) -> None:
    made = new_values((1 << 22) + 3, dtype, torch.device("cpu"))
    assert (made.dtype, made.shape) == (dtype, ((1 << 22) + 3,))
    assert made.fill_(1)[-1] == 1
