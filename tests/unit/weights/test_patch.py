"""Patches turn one version of a chunk into the next, bitwise, in the smallest form."""

import pytest
import torch

from megarl.weights.patch import (
    Change,
    PatchForm,
    apply_change,
    make_patch,
    patch_bytes,
    read_patch,
    section_bytes,
)
from megarl.weights.tensors import WeightTransferError

DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


def values_of(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of any bits, with NaN and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "form"),
    [
        (0, PatchForm.UNCHANGED),
        (1, PatchForm.POSITIONS),
        (100, PatchForm.POSITIONS),
        (4000, PatchForm.BITMAP),
        (9990, PatchForm.FULL),
    ],
)
def test_every_form_restores_all_bits(dtype: torch.dtype, count: int, form: PatchForm) -> None:
    numel = 10_000
    old = values_of(numel, dtype, 1)
    new = old.clone()
    generator = torch.Generator().manual_seed(count)
    where = torch.randperm(numel, generator=generator)[:count]
    new.view(torch.uint8).view(numel, -1)[where] ^= 0b10000001  # all of them change, some to NaN

    patch = make_patch(old, new)
    assert patch.form == form
    assert patch.count == (numel if form is PatchForm.FULL else count)
    sizes = section_bytes(patch.form, patch.count, numel, dtype.itemsize)
    assert [len(section) for section in patch.sections] == list(sizes)
    change = read_patch(patch.form, patch.count, patch.sections, numel, dtype)
    assert (change is None) == (form is PatchForm.UNCHANGED)
    if change is not None:
        # the chunk: a vector, a column of a matrix, and a matrix that is stored twice
        stored = old.clone()
        column = torch.zeros(500, 3, dtype=dtype)
        column[:, 1] = stored[100:600]
        second = stored[600:].clone().view(94, 100)
        apply_change(
            change,
            [(100, [stored[:100]]), (500, [column[:, 1]]), (9400, [stored[600:].view(94, 100), second])],
        )
        assert torch.equal(bits(stored[:100]), bits(new[:100]))
        assert torch.equal(bits(column[:, 1]), bits(new[100:600]))
        assert torch.equal(bits(stored[600:]), bits(new[600:]))
        assert torch.equal(bits(second.view(-1)), bits(new[600:]))


def test_negative_zero_and_nan_are_bits() -> None:
    nan = float("nan")
    old = torch.tensor([0.0, nan, 1.0, -0.0])
    assert make_patch(old, old.clone()).form is PatchForm.UNCHANGED  # although NaN differs from NaN
    patch = make_patch(old.repeat(64), torch.tensor([-0.0, nan, 1.0, -0.0]).repeat(64))
    assert patch.count == 64  # although the two zeros are equal


def test_elements_of_another_dtype_are_cast_like_in_a_full_transfer() -> None:
    stored = torch.zeros(4, 2)
    change = Change(torch.tensor([1, 5]), torch.tensor([0.1, 3.0], dtype=torch.bfloat16))
    apply_change(change, [(8, [stored])])
    assert stored.view(-1).tolist() == [0, 0.10009765625, 0, 0, 0, 3.0, 0, 0]


def test_sizes_by_hand() -> None:
    """8 positions below 800 take 8 + 24 bits of high parts, and five times 8 low bits."""
    assert section_bytes(PatchForm.POSITIONS, 8, 800, 2) == (4 + 5, 16)
    assert section_bytes(PatchForm.BITMAP, 8, 800, 2) == (100, 16)
    assert patch_bytes(PatchForm.BITMAP, 3, 800, 2) == 104 + 8
    assert patch_bytes(PatchForm.FULL, 800, 800, 2) == 1600
    assert patch_bytes(PatchForm.UNCHANGED, 0, 800, 2) == 0


def test_a_damaged_patch_is_refused() -> None:
    old = torch.zeros(1000)
    new = old.clone()
    new[[3, 500, 900]] = 1.0
    form, count, (where, values) = make_patch(old, new)
    with pytest.raises(WeightTransferError, match="3 encoded positions"):
        read_patch(form, count, (torch.zeros_like(where), values), 1000, torch.float32)
    with pytest.raises(
        WeightTransferError, match="1000 values in the form FULL does not describe a chunk of"
    ):
        read_patch(PatchForm.FULL, 1000, (new.view(torch.uint8),), 999, torch.float32)
