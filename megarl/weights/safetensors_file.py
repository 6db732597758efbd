"""Write safetensors files from pieces that arrive in any order, and read their tensors.

Tensors are read in the dtypes and shapes of the model, whatever the format of the file. One of a plain dtype
is memory-mapped. Slices of a packed one are converted when they are read: matrices may be in block-scaled FP8
(see models/fp8.py), and experts in MXFP4, the format of gpt-oss: 32 numbers of four bits share a scale (OCP
2023, MX 1.0). A matrix of R rows and C columns is stored as `_blocks` (..., R, C / 32, 16), two numbers in a
byte, the first in the low bits, and `_scales` (..., R, C / 32), exponents of two with a bias of 127. The
model's tensor is its transpose (..., C, R), in bfloat16.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megarl.models.fp8 import scale_name
from megarl.weights.block_scaling import expanded
from megarl.weights.checkpoint_index import BLOCKS, MXFP4_BLOCK, SCALES, Packing, TensorInFile
from megarl.weights.piece import enclosing_slice
from megarl.weights.tensors import (
    Manifest,
    TensorSlice,
    WeightReceipt,
    WeightTransferError,
    contiguous_blocks,
)

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}

# Write in pieces of this size: data that fits into a core's cache is copied twice as fast.
_WRITE_BYTES = 2**20


class SafetensorsFile:
    """A safetensors file that is complete when `close` returns.

    Args:
        path: The file to create.
        manifest: Its tensors, in the order in which they are stored.
        durable: Whether the file must survive a power cut.
    """

    def __init__(self, path: Path, manifest: Manifest, durable: bool = True) -> None:
        self._path = path
        self._durable = durable

        # The system writes a file from one thread at a time and lets other threads spin.
        self._lock = threading.Lock()
        self._receipt = WeightReceipt(manifest)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0

        # Wide elements come first, so that every tensor starts at a multiple of its element size.
        for name, meta in sorted(manifest.items(), key=lambda item: -item[1].dtype.itemsize):
            self._starts[name] = end
            end = end + prod(meta.shape) * meta.dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[meta.dtype],
                "shape": list(meta.shape),
                "data_offsets": [self._starts[name], end],
            }

        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # data must start at a multiple of eight bytes
        self._data_start = 8 + len(encoded)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

        try:
            # The final size is set at once, because pieces arrive in any order.
            with self._named():
                os.ftruncate(self._file, self._data_start + end)
            self._write(len(encoded).to_bytes(8, "little") + encoded, 0)
        except OSError:
            os.close(self._file)
            raise

    def write(self, name: str, offset: int, data: torch.Tensor) -> None:
        """Write consecutive elements of a row-major tensor.

        Args:
            name: The name of the tensor.
            offset: The position of the first element.
            data: The elements: flat, in host memory.

        Raises:
            WeightTransferError: The elements do not belong to the file.
            OSError: The disk is full.
        """
        self._receipt.record(name, offset, offset + data.numel(), data.dtype)
        place = self._data_start + self._starts[name] + offset * data.element_size()
        self._write(data.view(torch.uint8).numpy().data, place)

    def _write(self, data: bytes | memoryview, place: int) -> None:
        rest = memoryview(data)
        with self._named():
            while rest:
                with self._lock:
                    written = os.pwrite(self._file, rest[:_WRITE_BYTES], place)
                rest = rest[written:]
                place = place + written

    def close(self) -> None:
        """Complete the file.

        Raises:
            WeightTransferError: Tensors are missing or duplicated; the message names them.
            OSError: The disk did not accept all data.
        """
        with self._named():
            try:
                self._receipt.close()
                if self._durable:
                    os.fsync(self._file)
            finally:
                os.close(self._file)

    @contextmanager
    def _named(self) -> Generator[None]:
        """Add the path of the file to exceptions of the system, which do not contain it."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def abandon(self) -> None:
        """Close the file as it is, incomplete."""
        os.close(self._file)


def nonfinite_problem(values: torch.Tensor) -> str | None:
    """Return what is wrong with a tensor, or a part of it, that has NaN or infinity; None if it has none."""
    # The sum is finite if all elements are, unless they are very large. It needs no memory.
    if not values.is_floating_point() or bool(values.sum(dtype=torch.float32).isfinite()):
        return None
    # torch has no isfinite for all 8-bit types.
    if bool((values.float() if values.dtype.itemsize == 1 else values).isfinite().all()):
        return None
    return "has elements that are NaN or infinite; use another copy of the folder, or an earlier checkpoint"


def check_finite(values: torch.Tensor, name: str, file: Path) -> None:
    """Refuse a tensor that was read from a file if it has NaN or infinity.

    Raises:
        WeightTransferError: It has. The message names the file and the tensor.
    """
    if (problem := nonfinite_problem(values)) is not None:
        raise WeightTransferError(f"{file}: {name} {problem}")


# ---- reading

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
        scales: The scales of all blocks of the whole matrix, float32.
        dtype: The dtype of the result.
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
