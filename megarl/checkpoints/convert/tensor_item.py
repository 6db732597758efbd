"""What torch.save writes around a tensor's elements, made by hand: so that they can be streamed to a place that was planned before.

An item is a zip archive without compression. The elements' checksum stands behind them (a data descriptor), as torch writes it too.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from megarl.checkpoints.torch_dist_index import ITEM_ALIGNMENT
from megarl.weights.checksum import row_major_strides

MAX_ELEMENTS_NBYTES = 2**31  # an archive of 4 GiB would need other headers
_STORAGE = "archive/data/0"
_LOCAL, _DIRECTORY, _END, _DESCRIPTOR = "<IHHHHHIIIHH", "<IHHHHHHIIIHHHHHII", "<IHHHHIIH", "<IIII"
_IS_UTF8, _HAS_DESCRIPTOR = 0x800, 0x8
_PADDING_FIELD = b"FB"  # torch's own name of the field that aligns the elements


@dataclass(frozen=True, kw_only=True)
class TensorFrame:
    """head: what stands before the elements, which begin at a multiple of 64 bytes of the item. entries: of the zip, so far."""

    head: bytes
    nbytes_of_elements: int
    entries: tuple[_Entry, ...]

    @property
    def nbytes(self) -> int:
        """Of the whole item."""
        return len(self.head) + self.nbytes_of_elements + len(self.tail(0))

    def tail(self, crc: int) -> bytes:
        """What stands behind the elements. crc: `zlib.crc32` of them."""
        size = self.nbytes_of_elements
        out = bytearray(struct.pack(_DESCRIPTOR, 0x08074B50, crc, size, size))
        before = len(self.head) + size
        entries = [*self.entries, _Entry(_STORAGE, _storage_header(self.entries), crc, size, _HAS_DESCRIPTOR)]
        entries.append(_append(out, before, "archive/version", b"3\n"))
        start = before + len(out)
        for entry in entries:
            out += entry.in_directory()
        out += struct.pack(_END, 0x06054B50, 0, 0, len(entries), len(entries), before + len(out) - start, start, 0)
        return bytes(out)


@dataclass(frozen=True)
class _Entry:
    name: str
    position: int
    crc: int
    size: int
    flags: int = 0

    def local(self, extra: bytes) -> bytes:
        crc, size = (0, 0) if self.flags else (self.crc, self.size)
        name = self.name.encode()
        return struct.pack(_LOCAL, 0x04034B50, 0, _IS_UTF8 | self.flags, 0, 0, 0, crc, size, size, len(name), len(extra)) + name + extra

    def in_directory(self) -> bytes:
        name, flags = self.name.encode(), _IS_UTF8 | self.flags
        numbers = (0, 0, flags, 0, 0, 0, self.crc, self.size, self.size, len(name), 0, 0, 0, 0, 0, self.position)
        return struct.pack(_DIRECTORY, 0x02014B50, *numbers) + name

    @property
    def end(self) -> int:
        return self.position + struct.calcsize(_LOCAL) + len(self.name) + self.size


def _append(out: bytearray, before: int, name: str, content: bytes) -> _Entry:
    entry = _Entry(name, before + len(out), zlib.crc32(content), len(content))
    out += entry.local(b"") + content
    return entry


def _storage_header(entries: tuple[_Entry, ...]) -> int:
    """Where the header of the elements stands: behind the other files."""
    return entries[-1].end


@lru_cache(maxsize=1024)
def tensor_frame(shape: tuple[int, ...], dtype: torch.dtype) -> TensorFrame:
    """Of a contiguous tensor. Raises ValueError for one of 2 GiB or more."""
    size = prod(shape) * dtype.itemsize
    if size >= MAX_ELEMENTS_NBYTES:
        raise ValueError(f"an item of {size} bytes, shape {shape}: at most {MAX_ELEMENTS_NBYTES - 1} fit; cut it")
    out = bytearray()
    entries = (
        _append(out, 0, "archive/data.pkl", _pickled(shape, dtype)),
        _append(out, 0, "archive/byteorder", b"little"),
    )
    storage = _Entry(_STORAGE, len(out), 0, size, _HAS_DESCRIPTOR)
    field = len(storage.local(b"")) + 4  # where the padding field's content begins
    padding = -(len(out) + field) % ITEM_ALIGNMENT
    out += storage.local(_PADDING_FIELD + struct.pack("<H", padding) + b"Z" * padding)
    return TensorFrame(head=bytes(out), nbytes_of_elements=size, entries=entries)


class _Storage:
    """Stands for the elements."""


class _Outline:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild: Any = torch._utils._rebuild_tensor_v2
        return rebuild, (_Storage(), 0, self._shape, row_major_strides(self._shape), False, OrderedDict())


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, kind: Any, count: int) -> None:
        super().__init__(file, protocol=2)
        self._storage = ("storage", kind, "0", "cpu", count)

    def persistent_id(self, value: Any) -> Any:
        return self._storage if isinstance(value, _Storage) else None


_STORAGE_KINDS = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
}


def _pickled(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    file = io.BytesIO()
    _Pickler(file, _STORAGE_KINDS[dtype], prod(shape)).dump(_Outline(shape))
    return file.getvalue()
