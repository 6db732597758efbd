"""Patches turn one version of a chunk into the next, bitwise, in the smallest form."""

import pytest
import torch

from megarl.weights.patch import (
    PatchForm,
    apply_change,
    decode_positions,
    encode_positions,
    make_patch,
    pack_bits,
    patch_bytes,
    positions_bytes,
    read_patch,
    section_bytes,
    unpack_bits,
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

    own_form, num_values, sections = make_patch(old, new)
    assert own_form == form
    assert num_values == (numel if form is PatchForm.FULL else count)
    sizes = section_bytes(form, num_values, numel, dtype.itemsize)
    assert [len(section) for section in sections] == list(sizes)
    change = read_patch(form, num_values, sections, numel, dtype)
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
    assert make_patch(old, old.clone())[0] is PatchForm.UNCHANGED  # although NaN differs from NaN
    _, count, _ = make_patch(old.repeat(64), torch.tensor([-0.0, nan, 1.0, -0.0]).repeat(64))
    assert count == 64  # although the two zeros are equal


def test_elements_of_another_dtype_are_cast_like_in_a_full_transfer() -> None:
    stored = torch.zeros(4, 2)
    change = torch.tensor([1, 5]), torch.tensor([0.1, 3.0], dtype=torch.bfloat16)
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


def test_bits_by_hand() -> None:
    bits = torch.tensor([True, False, True, True, False, False, False, True, False, True])
    packed = pack_bits(bits)
    assert packed.tolist() == [0b10001101, 0b10]
    assert torch.equal(unpack_bits(packed, 10), bits)
    assert pack_bits(bits[:0]).tolist() == []
    assert torch.equal(unpack_bits(pack_bits(torch.ones(64, dtype=torch.bool)), 64).sum(), torch.tensor(64))


def test_positions_by_hand() -> None:
    """The low bits of 1, 14 and 31 are 1, 0 and 1. The high parts 0, 7 and 15 are the bits 0, 8 and 17."""
    encoded = encode_positions(torch.tensor([1, 14, 31]), 32)
    assert encoded.tolist() == [0b1, 0b1, 0b10, 0b101]
    assert len(encoded) == positions_bytes(3, 32)
    assert decode_positions(encoded, 3, 32).tolist() == [1, 14, 31]


@pytest.mark.parametrize("numel", [1, 7, 1000, 2**20])
@pytest.mark.parametrize("share", [0.00001, 0.01, 0.3, 1.0])
def test_positions_survive_their_encoding(numel: int, share: float) -> None:
    generator = torch.Generator().manual_seed(numel)
    mask = torch.rand(numel, generator=generator) < share
    mask[-1] = True
    positions = mask.nonzero().view(-1)
    encoded = encode_positions(positions, numel)
    assert len(encoded) == positions_bytes(len(positions), numel)
    assert torch.equal(decode_positions(encoded, len(positions), numel), positions)
    assert torch.equal(unpack_bits(pack_bits(mask), numel), mask)


def test_a_hundredth_takes_about_nine_bits_each() -> None:
    count = 2**20 // 100
    assert 8 * positions_bytes(count, 2**20) / count < 8.7
