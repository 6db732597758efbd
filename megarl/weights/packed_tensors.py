"""Read tensors of safetensors files in the dtypes and shapes of the model, whatever their format.

A tensor of a plain dtype is memory-mapped. Slices of a packed one are converted when they are read:

Matrices may be in block-scaled FP8 (see models/fp8.py). Experts may be in MXFP4, the format of gpt-oss: 32
numbers of four bits share a scale (OCP 2023, MX 1.0). A matrix of R rows and C columns is stored as `_blocks`
(..., R, C / 32, 16), two numbers in a byte, the first in the low bits, and `_scales` (..., R, C / 32),
exponents of two with a bias of 127. The model's tensor is its transpose (..., C, R), in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megarl.models.fp8 import scale_name
from megarl.weights.block_scaling import expanded
from megarl.weights.checkpoint_index import BLOCKS, MXFP4_BLOCK, SCALES, Packing, TensorInFile
from megarl.weights.piece import enclosing_slice
from megarl.weights.tensors import TensorSlice, contiguous_blocks

_STEP_ELEMENTS = 2**20  # converted at a time
_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class OpenFiles(ExitStack):
    """Opens each safetensors file once, and closes all of them at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, Any] = {}

    def __getitem__(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = self.enter_context(safe_open(file, framework="pt"))
        return self._opened[file]

    def open(
        self,
        name: str,
        stored: TensorInFile,
        view: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Elements:
        """Open a tensor of the model.

        Args:
            name: The name of the tensor.
            stored: How it is stored.
            view: The row-major view of the tensor whose slices are read. None: its own shape.
            dtype: The dtype of what is computed, the elements of a matrix in FP8.
        """
        view = view or stored.shape
        file = self[stored.file]
        if stored.scales is None:
            return file.get_tensor(name).view(view)

        scales_file = self[stored.scales.file]
        if stored.packing is Packing.mxfp4:
            read = partial(unpack, file.get_tensor(name + BLOCKS), scales_file.get_tensor(name + SCALES))
        else:
            scales = scales_file.get_tensor(scale_name(name)).float()
            read = partial(dequantize, file.get_tensor(name), scales, dtype)
        return LazyTensor(read, stored.shape, view)


class LazyTensor:
    """A tensor of which slices are computed when they are read. Each slice needs a start and a stop.

    Args:
        read: Returns a slice of the tensor.
        shape: The shape of the tensor.
        view: The row-major view of the tensor in which `__getitem__` takes a slice.
    """

    def __init__(
        self, read: Callable[[TensorSlice], torch.Tensor], shape: tuple[int, ...], view: tuple[int, ...]
    ) -> None:
        self._read = read
        self._shape = shape
        self._view = view

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        wanted = TensorSlice(tuple(each.start for each in index), tuple(each.stop for each in index))
        part, view, inside = enclosing_slice(wanted, self._view, self._shape)
        return self._read(part).reshape(view)[inside]


Elements = torch.Tensor | LazyTensor


def dequantize(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, part: TensorSlice
) -> torch.Tensor:
    """Return a slice of a matrix in FP8. Besides it, memory for a few million elements is needed.

    Args:
        values: The matrix.
        scales: The scales of all of its blocks, float32.
        dtype: The dtype of the result.
        part: The slice.
    """
    matrix = torch.empty(part.shape, dtype=dtype)
    for _, step in contiguous_blocks(part.shape, _STEP_ELEMENTS):
        place = step.relative_to((0, 0), part.starts)
        matrix[step.index] = values[place.index].float().mul_(expanded(scales, place))
    return matrix


def unpack(blocks: torch.Tensor, scales: torch.Tensor, part: TensorSlice) -> torch.Tensor:
    """Return a slice of a tensor in MXFP4, bfloat16, given its blocks and scales, uint8."""
    *leading, columns, rows = part.index
    # A scale belongs to a whole block, so all blocks that the columns touch are converted.
    groups = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
    packed = blocks[*leading, rows, groups]

    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack([values[(packed & 15).int()], values[(packed >> 4).int()]], dim=-1)
    exponents = scales[*leading, rows, groups].int()[..., None] - _BIAS
    whole = torch.ldexp(pairs.flatten(-2), exponents).to(torch.bfloat16).flatten(-2)

    first = columns.start - groups.start * MXFP4_BLOCK
    return whole[..., first : first + columns.stop - columns.start].transpose(-1, -2)
