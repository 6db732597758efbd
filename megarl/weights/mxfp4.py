"""Reads experts in MXFP4, the format of gpt-oss: 32 numbers of four bits share a scale (OCP 2023, MX 1.0).

A matrix of R rows and C columns is stored as `_blocks` (..., R, C / 32, 16), two numbers in a byte, the first
in the low bits, and `_scales` (..., R, C / 32), exponents of two with a bias of 127. The model's tensor is
its transpose (..., C, R), in bfloat16. Slices of it are converted when they are read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 32  # numbers that share a scale
BLOCKS = "_blocks"
SCALES = "_scales"
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Slices = tuple[slice, ...]


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor from that of its blocks."""
    *leading, rows, groups, _ = blocks
    return (*leading, groups * BLOCK, rows)


def read_unpacked(read: Callable[[str, Slices], torch.Tensor], slices: Slices) -> torch.Tensor:
    """Return a slice of a tensor, bfloat16.

    Args:
        read: Reads a slice of the blocks or of the scales, by their suffix.
        slices: One for each dimension of the tensor.
    """
    *leading, columns, rows = slices
    # A scale belongs to a whole block, so all blocks that the columns touch are read.
    groups = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
    blocks = read(BLOCKS, (*leading, rows, groups, slice(0, BLOCK // 2)))
    scales = read(SCALES, (*leading, rows, groups))

    first = columns.start - groups.start * BLOCK
    whole = unpack(blocks, scales)
    return whole[..., first : first + columns.stop - columns.start].transpose(-1, -2)


def unpack(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert blocks (..., R, G, 16) and scales (..., R, G), uint8, to numbers (..., R, 32 G) bfloat16."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], dim=-1)
    exponents = scales.int()[..., None] - _BIAS
    return torch.ldexp(pairs.flatten(-2), exponents).to(torch.bfloat16).flatten(-2)
