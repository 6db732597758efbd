"""Positions and bits survive their encodings, which are as small as they promise."""

import pytest
import torch

from megarl.weights.positions import (
    decode_positions,
    encode_positions,
    pack_bits,
    positions_bytes,
    unpack_bits,
)


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
def test_round_trip(numel: int, share: float) -> None:
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
