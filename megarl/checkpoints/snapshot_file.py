"""The state of one rank in a file in memory (machine/memory_files.py).

A snapshot has the tensors that a checkpoint would store of the rank, each with its slice of the whole tensor
and its checksum, and a small record for everything else. A rank with the same layout reads all of it; ranks
with another layout read the slices that they need from several snapshots. As in a checkpoint, each tensor of
the model is described by its name and slices of the whole tensor, whatever the layout. Among the ranks that
hold the same elements, those that would write them into a checkpoint cover each tensor once.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from megarl.machine.errors import CheckpointError
from megarl.machine.memory_files import HEADER_BYTES, Header, decode_header
from megarl.weights.tensors import TensorSlice, chunks_fault

_ALIGNMENT = 64  # bytes
_RECORD = "its record"
_NO_CHECKSUM = "0" * 16  # as long as a checksum, so that the size of the index is known before


class SnapshotTensor(NamedTuple):
    """A tensor of a snapshot.

    Attributes:
        key: The name of the checkpoint tensor; `_RECORD` for the record.
        place: The slice of the checkpoint tensor.
        is_main: Whether this rank writes the slice into checkpoints; see Shard.
        dtype: The name of the dtype, such as "float32".
        position: The first byte in the file. This and the next are set when the tensor is written.
    """

    key: str
    place: TensorSlice
    is_main: bool
    dtype: str
    nbytes: int
    position: int = 0
    checksum: str = _NO_CHECKSUM


# The contents of a snapshot: its tensors, and last the record, which is one of bytes.
SnapshotIndex = tuple[SnapshotTensor, ...]


def decode_index(data: bytes) -> SnapshotIndex:
    """Read the index at the end of a snapshot."""
    return tuple(
        SnapshotTensor(place=TensorSlice(tuple(starts), tuple(stops)), **entry)
        for entry in json.loads(data)
        for starts, stops in [entry.pop("place")]
    )


def write_snapshot(
    path: str,
    step: int,
    tensors: Sequence[tuple[SnapshotTensor, Callable[[Tensor], object]]],
    record: bytes,
) -> int:
    """Write a snapshot, replacing an older one. Returns its size in bytes.

    Args:
        tensors: The tensors to write, and what copies their elements into a host tensor of this shape and
            dtype.

    Raises:
        OSError: The file cannot be opened, or memory is exhausted.
    """
    content = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    of_record = SnapshotTensor(_RECORD, TensorSlice.whole(content.shape), False, "uint8", len(record))
    parts = [*tensors, (of_record, lambda target: target.copy_(content))]
    # The positions, and so the size of the file, follow from the shapes.
    positions = _positions([tensor.nbytes for tensor, _ in parts])
    entries: list[dict[str, Any]] = [
        {**tensor._asdict(), "place": (tensor.place.starts, tensor.place.stops), "position": position}
        for (tensor, _), position in zip(parts, positions, strict=True)
    ]
    header = Header(step, positions[-1] + len(record), len(_encoded(entries)), time.time_ns())

    with Path(path).open("r+b", buffering=0) as file:
        # From here on the old contents are gone, until the header is written again.
        os.pwrite(file.fileno(), bytes(HEADER_BYTES), 0)
        file.truncate(header.nbytes)
        os.posix_fallocate(file.fileno(), 0, header.nbytes)  # fails here, and not by a signal during a copy
        memory = mmap.mmap(file.fileno(), header.nbytes)
        for (tensor, copy_to), entry in zip(parts, entries, strict=True):
            if tensor.nbytes:
                dtype = getattr(torch, tensor.dtype)
                copy_to(_elements(memory, entry["position"], tensor.place.shape, dtype))
            entry["checksum"] = _checksum(memory, entry["position"], tensor.nbytes)
        memory[header.index_start : header.nbytes] = _encoded(entries)
        os.pwrite(file.fileno(), header.encode(), 0)

    return header.nbytes


def _positions(sizes: Sequence[int]) -> list[int]:
    positions = []
    position = HEADER_BYTES
    for size in sizes:
        positions.append(position)
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return positions


def _encoded(entries: list[dict[str, Any]]) -> bytes:
    return json.dumps(entries).encode()


def _elements(memory: mmap.mmap, position: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=position).view(*shape)


def _checksum(memory: mmap.mmap, position: int, nbytes: int) -> str:
    with memoryview(memory) as view, view[position : position + nbytes] as part:
        return xxhash.xxh3_64(part).hexdigest()


@dataclass(frozen=True, kw_only=True)
class SnapshotFile:
    """A complete snapshot."""

    step: int
    path: str
    memory: mmap.mmap
    index: SnapshotIndex

    def tensor(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return a view of a tensor, in the shape of its slice.

        Raises:
            CheckpointError: It has another dtype, or its checksum differs.
        """
        stored = self.index[number]
        if stored.dtype != str(dtype).removeprefix("torch."):
            raise CheckpointError(
                f"the snapshot of step {self.step}: {stored.key} is {stored.dtype}, but this rank needs "
                f"{dtype}"
            )

        if _checksum(self.memory, stored.position, stored.nbytes) != stored.checksum:
            raise CheckpointError(
                f"the snapshot of step {self.step}: {stored.key} is damaged: its checksum differs"
            )
        shape = stored.place.shape
        return (
            _elements(self.memory, stored.position, shape, dtype)
            if stored.nbytes
            else torch.empty(*shape, dtype=dtype)
        )

    def record(self) -> bytes:
        return self.tensor(-1, torch.uint8).numpy().tobytes()


def open_snapshot(path: str) -> SnapshotFile:
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

    index = decode_index(memory[header.index_start : header.nbytes])
    return SnapshotFile(step=header.step, path=path, memory=memory, index=index)


# ---- slices of several snapshots


# A slice of a checkpoint tensor that a rank needs: the name of the tensor; the shape of the whole tensor in
# this layout; the slice; and whether rows at the end may only pad the vocabulary, so that their number
# depends on the layout.
WantedTensor = tuple[str, tuple[int, ...], TensorSlice, bool]
# Places of a slice in the snapshots of several ranks: (name of the file, number in its index).
_Copies = list[tuple[str, int]]


class _SlicedTensor:
    """The slices of one tensor, in which those that meet another slice are found without looking at all.

    Megatron prepends axes, such as the layer axis, along which each slice has length 1. Slices with the same
    indices along them are sorted by their first index along the next axis.

    Args:
        key: The name of the tensor.
        slices: Its slices, which cover it once, and their copies.
    """

    def __init__(self, key: str, slices: Mapping[TensorSlice, _Copies]) -> None:
        self.shape = tuple(map(max, zip(*(place.stops for place in slices), strict=True)))
        fault = chunks_fault(self.shape, list(slices))
        assert fault is None, f"the snapshots do not have each element of {key} once: {fault}"
        lengths = list(zip(*(place.shape for place in slices), strict=True))
        last = len(lengths) - 1
        # Slices are found by bisection along the first axis on which one of them is longer than 1.
        self._axis = next((axis for axis in range(last) if max(lengths[axis]) > 1), last)
        self._longest = max(lengths[self._axis])
        self._copies = slices
        self._groups: dict[Sequence[int], list[TensorSlice]] = defaultdict(list)
        for place in sorted(slices, key=lambda place: place.starts):
            self._groups[place.starts[: self._axis]].append(place)

    def meeting(self, place: TensorSlice) -> Iterator[_Copies]:
        """Yield the copies of each slice that has elements of a slice."""
        axis = self._axis
        # A slice that starts earlier ends before the place.
        first_start = place.starts[axis] - self._longest + 1
        for indices in product(*map(range, place.starts[:axis], place.stops[:axis])):
            group = self._groups.get(indices, [])
            first = bisect_left(group, first_start, key=lambda each: each.starts[axis])
            last = bisect_left(group, place.stops[axis], key=lambda each: each.starts[axis])
            yield from (self._copies[each] for each in group[first:last] if each.intersect(place) is not None)


class SnapshotSlices:
    """All slices that the snapshots of one model have.

    Args:
        indexes: The indexes of the snapshots of all its ranks, by file name.
    """

    def __init__(self, indexes: Mapping[str, SnapshotIndex]) -> None:
        copies: dict[str, dict[TensorSlice, _Copies]] = defaultdict(dict)
        for name, index in indexes.items():
            for number, tensor in enumerate(index):
                if tensor.is_main:
                    copies[tensor.key].setdefault(tensor.place, []).append((name, number))

        self._tensors = {key: _SlicedTensor(key, of_key) for key, of_key in copies.items()}

    def sources(self, wanted: Iterable[WantedTensor], near: Collection[str]) -> dict[str, list[int]]:
        """Return which tensors of which files have the elements that a rank needs, each element once.

        Args:
            wanted: What the rank needs.
            near: Names of the files on the rank's node, which are preferred.

        Returns:
            The numbers of tensors in the index of each file, in order.
        """
        chosen: dict[str, set[int]] = defaultdict(set)
        for key, shape, place, is_padded in wanted:
            self._check_shape(key, shape, is_padded)
            for copies in self._tensors[key].meeting(place):
                name, number = min(copies, key=lambda entry: entry[0] not in near)
                chosen[name].add(number)
        return {name: sorted(numbers) for name, numbers in chosen.items()}

    def _check_shape(self, key: str, shape: tuple[int, ...], is_padded: bool) -> None:
        assert key in self._tensors, f"the snapshots have no tensor {key}"
        stored = self._tensors[key].shape
        assert stored[is_padded:] == shape[is_padded:], (
            f"{key} has shape {stored} in the snapshots, but this model needs {shape}"
        )
