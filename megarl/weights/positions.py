"""Encode ascending positions in few bytes, and pack bits.

The code of Elias and Fano splits a position into its low bits, which are stored as they are, and its high
bits, whose differences are stored in unary. It takes about two bits per position more than the logarithm of
their mean distance. All functions run on the device of their arguments.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from megarl.weights.tensors import WeightTransferError

_MOST_LOW_BITS = 31
# The product of this number and eight bytes that are 0 or 1 has the bytes as bits in its highest byte.
_GATHER_BITS = 0x0102040810204080


def packed_bytes(num_bits: int) -> int:
    return -(-num_bits // 8)


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return flat booleans as bits of bytes, the first in the lowest bit. The last byte is filled with 0."""
    padded = bits.new_zeros(packed_bytes(len(bits)) * 8, dtype=torch.uint8)
    padded[: len(bits)] = bits
    return (padded.view(torch.int64) * _GATHER_BITS >> 56).bitwise_and_(255).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return the booleans that `pack_bits` packed."""
    words = _bytes_of_bits(packed.device)[packed.long()]
    return words.view(torch.bool)[:num_bits]


@lru_cache(maxsize=8)
def _bytes_of_bits(device: torch.device) -> torch.Tensor:
    """Return, for each byte, its bits as the eight bytes of an integer."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return bits.to(torch.uint8).view(torch.int64).flatten().to(device)


def positions_bytes(count: int, numel: int) -> int:
    """Return the size of `count` encoded positions below `numel`."""
    return _num_bytes(count, numel, _low_bits(count, numel))


def encode_positions(positions: torch.Tensor, numel: int) -> torch.Tensor:
    """Encode ascending positions, at least one, of which all are below `numel`."""
    count = len(positions)
    num_low = _low_bits(count, numel)
    high = torch.zeros(_high_bits(count, numel, num_low), dtype=torch.bool, device=positions.device)
    high[(positions >> num_low) + torch.arange(count, device=positions.device)] = True
    low = [pack_bits(positions >> bit & 1) for bit in range(num_low)]

    return torch.cat([pack_bits(high), *low])


def decode_positions(encoded: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    """Return the positions that `encode_positions` encoded.

    Raises:
        WeightTransferError: The bytes are not `count` encoded positions.
    """
    num_low = _low_bits(count, numel)
    num_high = _high_bits(count, numel, num_low)
    high, *low = encoded.split([packed_bytes(num_high), *[packed_bytes(count)] * num_low])
    found = unpack_bits(high, num_high).nonzero().view(-1)
    if len(found) != count:
        raise WeightTransferError(f"{len(found)} positions arrived, not {count} encoded positions")
    positions = found - torch.arange(len(found), device=encoded.device) << num_low

    for bit, packed in enumerate(low):
        positions += unpack_bits(packed, count).long() << bit
    return positions


@lru_cache(maxsize=4096)
def _low_bits(count: int, numel: int) -> int:
    """Return the number of low bits with which the positions take the fewest bytes."""
    return min(range(_MOST_LOW_BITS), key=lambda num_low: _num_bytes(count, numel, num_low))


def _high_bits(count: int, numel: int, num_low: int) -> int:
    return count + (numel - 1 >> num_low)


def _num_bytes(count: int, numel: int, num_low: int) -> int:
    return packed_bytes(_high_bits(count, numel, num_low)) + num_low * packed_bytes(count)
