"""The state of one rank in a file in memory (machine/memory_files.py).

A snapshot has the tensors that a checkpoint would store of the rank, each with its checksum, and a small
record for everything else. It is read by a rank with the same layout.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from megarl.machine.errors import CheckpointError
from megarl.machine.memory_files import HEADER_BYTES, Header, decode_header

_ALIGNMENT = 64  # bytes
_NO_CHECKSUM = "0" * 16  # as long as a checksum, so that the size of the index is known before


class SnapshotTensor(NamedTuple):
    """A tensor to write.

    Attributes:
        key: Identifies the tensor within the snapshot.
        copy_to: Copies the elements into a host tensor of this shape and dtype.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    copy_to: Callable[[Tensor], object]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_snapshot(path: str, step: int, tensors: Sequence[SnapshotTensor], record: bytes) -> int:
    """Write a snapshot, replacing an older one. Returns its size in bytes.

    Raises:
        OSError: The file cannot be opened, or memory is exhausted.
    """
    # The positions, and so the size of the file, follow from the shapes.
    sizes = [tensor.nbytes for tensor in tensors]
    positions = _positions([*sizes, len(record)])
    entries: list[dict[str, Any]] = [
        {
            "key": tensor.key,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "position": position,
            "nbytes": tensor.nbytes,
            "checksum": _NO_CHECKSUM,
        }
        for tensor, position in zip(tensors, positions, strict=False)
    ]
    index: dict[str, Any] = {
        "tensors": entries,
        "record": {"position": positions[-1], "nbytes": len(record), "checksum": _NO_CHECKSUM},
    }
    header = Header(step, positions[-1] + len(record), len(_encoded(index)))

    with Path(path).open("r+b", buffering=0) as file:
        # From here on the old contents are gone, until the header is written again.
        os.pwrite(file.fileno(), bytes(HEADER_BYTES), 0)
        file.truncate(header.nbytes)
        os.posix_fallocate(file.fileno(), 0, header.nbytes)  # fails here, and not by a signal during a copy
        memory = mmap.mmap(file.fileno(), header.nbytes)
        for tensor, entry in zip(tensors, entries, strict=True):
            if tensor.nbytes:
                tensor.copy_to(_elements(memory, entry["position"], tensor.shape, tensor.dtype))
            entry["checksum"] = _checksum(memory, entry)
        record_start = index["record"]["position"]
        memory[record_start : record_start + len(record)] = record
        index["record"]["checksum"] = _checksum(memory, index["record"])
        memory[header.index_start : header.nbytes] = _encoded(index)
        os.pwrite(file.fileno(), header.encode(), 0)

    return header.nbytes


def _positions(sizes: Sequence[int]) -> list[int]:
    positions = []
    position = HEADER_BYTES
    for size in sizes:
        positions.append(position)
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return positions


def _encoded(index: dict[str, Any]) -> bytes:
    return json.dumps(index).encode()


def _elements(memory: mmap.mmap, position: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=position).view(*shape)


def _checksum(memory: mmap.mmap, entry: dict[str, Any]) -> str:
    with memoryview(memory) as view, view[entry["position"] : entry["position"] + entry["nbytes"]] as part:
        return xxhash.xxh3_64(part).hexdigest()


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """A complete snapshot."""

    step: int
    path: str
    memory: mmap.mmap
    index: dict[str, Any]

    @property
    def keys(self) -> list[str]:
        return [entry["key"] for entry in self.index["tensors"]]

    def tensor(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a view of a tensor.

        Raises:
            CheckpointError: It has another size or dtype, or its checksum differs.
        """
        entry = self.index["tensors"][number]
        expected = (str(dtype).removeprefix("torch."), prod(shape) * dtype.itemsize)
        if (entry["dtype"], entry["nbytes"]) != expected:
            raise CheckpointError(
                f"the snapshot of step {self.step}: {entry['key']} has {entry['nbytes']} bytes of "
                f"{entry['dtype']}, but this rank needs {expected[1]} of {expected[0]}"
            )
        self._check(entry, entry["key"])
        return (
            _elements(self.memory, entry["position"], shape, dtype)
            if entry["nbytes"]
            else torch.empty(*shape, dtype=dtype)
        )

    def record(self) -> bytes:
        entry = self.index["record"]
        self._check(entry, "its record")
        return self.memory[entry["position"] : entry["position"] + entry["nbytes"]]

    def _check(self, entry: dict[str, Any], name: str) -> None:
        if _checksum(self.memory, entry) != entry["checksum"]:
            raise CheckpointError(
                f"the snapshot of step {self.step}: {name} is damaged: its checksum differs"
            )


def open_snapshot(path: str) -> MemorySnapshot:
    """Open a snapshot.

    Raises:
        CheckpointError: It is incomplete.
        OSError: The file does not exist.
    """
    with Path(path).open("rb", buffering=0) as file:
        header = decode_header(file.read(HEADER_BYTES))
        if header is None:
            raise CheckpointError(f"{path}: the snapshot is incomplete")
        # A private map counts as writable for torch, but the file cannot be changed through it.
        memory = mmap.mmap(file.fileno(), header.nbytes, access=mmap.ACCESS_COPY)

    index = json.loads(memory[header.index_start : header.nbytes])
    return MemorySnapshot(step=header.step, path=path, memory=memory, index=index)
