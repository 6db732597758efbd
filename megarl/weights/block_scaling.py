"""Convert matrices to block-scaled FP8 and back, slice by slice (see models/fp8.py).

Scales are those of the whole matrix, so a slice may begin and end anywhere inside a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megarl.models.fp8 import BLOCK
from megarl.weights.message_words import block_slice
from megarl.weights.piece import enclosing_slice
from megarl.weights.tensors import TensorSlice, contiguous_blocks

LARGEST = 448.0  # of float8_e4m3fn
_LEAST_MAXIMUM = 1e-12  # a block of zeros gets a scale above 0
_STEP_ELEMENTS = 2**20  # converted at a time


class Elements(Protocol):
    """A tensor, or an object that reads slices of one."""

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor: ...


def scales_of(maxima: torch.Tensor) -> torch.Tensor:
    """Return the scales of blocks, float32, from their largest magnitudes."""
    return maxima.float().clamp_min(_LEAST_MAXIMUM) / LARGEST


def block_maxima(values: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """Return the largest magnitude of a matrix's elements in each block that it touches, float32.

    Args:
        values: A slice of a tensor.
        starts: Its first element in the tensor.
    """
    offsets = [start % BLOCK for start in starts]
    rows, columns = values.shape
    # Zeros complete the blocks at the edges, and do not change the largest magnitude.
    padding = (offsets[1], -(offsets[1] + columns) % BLOCK, offsets[0], -(offsets[0] + rows) % BLOCK)
    padded = torch.nn.functional.pad(values.float().abs(), padding)
    return padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).amax((1, 3))


def expanded(scales: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    """Return the scale of each element of a slice, from the scales of the whole tensor."""
    blocks = block_slice(part)
    rows, columns = blocks.shape
    each = scales[blocks.index][:, None, :, None]
    wide = each.expand(rows, BLOCK, columns, BLOCK).reshape(rows * BLOCK, columns * BLOCK)
    return wide[part.relative_to(tuple(start * BLOCK for start in blocks.starts)).index]


def quantize(values: torch.Tensor, scales: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    """Return a slice of a tensor in float8_e4m3fn, given the scales of the whole tensor."""
    scaled = values.float() / expanded(scales, part)
    return scaled.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


class ScaledMatrix:
    """A stored matrix in FP8, of which slices are dequantized when they are read.

    Args:
        values: The matrix, anything that returns a tensor for two slices.
        scales: The scales of its blocks.
        shape: The shape of the matrix.
        view: The row-major view of the matrix in which `__getitem__` takes a slice.
    """

    def __init__(
        self, values: Elements, scales: torch.Tensor, shape: tuple[int, ...], view: tuple[int, ...]
    ) -> None:
        self._values = values
        self._scales = scales.float()
        self._shape = shape
        self._view = view

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a slice of the view, float32. Each axis needs a start and a stop."""
        wanted = TensorSlice(tuple(each.start for each in index), tuple(each.stop for each in index))
        part, view, inside = enclosing_slice(wanted, self._view, self._shape)
        return self.read(part, torch.float32).view(view)[inside]

    def read(self, part: TensorSlice, dtype: torch.dtype) -> torch.Tensor:
        """Return a slice of the matrix. Besides it, memory for a few million elements is needed."""
        matrix = torch.empty(part.shape, dtype=dtype)
        for _, step in contiguous_blocks(part.shape, _STEP_ELEMENTS):
            place = step.relative_to((0, 0), part.starts)
            values = self._values[place.index].float()
            matrix[step.index] = values.mul_(expanded(self._scales, place))
        return matrix
