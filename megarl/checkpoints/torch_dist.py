"""Megatron's distributed checkpoint (torch_dist) as plain files: what lies where, read without a process group and without its pickles.

A folder holds `.metadata` (which chunk of which tensor, or which object, lies at which bytes of which file), `__<rank>_<n>.distcp`
(items back to back, each written by torch.save), `common.pt` and `metadata.json`.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megarl.checkpoints.pickles import DATA_NAMES, METADATA_NAMES, Name, Record, entry_start, load_listed, read_pickle
from megarl.config.errors import CheckpointError
from megarl.weights.boxes import Rectangle, tiling_fault

METADATA_FILE, COMMON_FILE, BACKEND_FILE = ".metadata", "common.pt", "metadata.json"
TORCH_DIST = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}

_REAL_CLASSES: dict[Name, Callable[..., Any]] = {
    (module.__name__, name): getattr(module, name)
    for module in (planner, metadata, filesystem)
    for module_name, name in METADATA_NAMES
    if module_name == module.__name__
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}  # looks a name up in torch's own table


@dataclass(frozen=True, kw_only=True)
class StoredItem:
    """What one torch.save wrote: bytes [position, position + nbytes) of `file`, a name in the folder."""

    file: str
    position: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class StoredChunk(StoredItem):
    """The box of a tensor that begins at `offsets` and has `shape`, whole in one item."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def rectangle(self) -> Rectangle:
        return Rectangle(self.offsets, tuple(map(int.__add__, self.offsets, self.shape)))


@dataclass(frozen=True, kw_only=True)
class DistributedTensor:
    """A tensor in chunks that hold each of its elements once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TorchDistIndex:
    """objects: what is no tensor, such as the RNG states (`rng_state/shard_0.1_2.2`)."""

    folder: Path
    tensors: dict[str, DistributedTensor]
    objects: dict[str, StoredItem]

    def items(self) -> Iterable[tuple[str, StoredItem]]:
        """(key, item) of every chunk and object."""
        for key, tensor in self.tensors.items():
            yield from ((key, chunk) for chunk in tensor.chunks)
        yield from self.objects.items()


def is_torch_dist(folder: Path) -> bool:
    return (folder / METADATA_FILE).is_file()


def read_index(folder: str | Path) -> TorchDistIndex:
    """Reads `.metadata` and proves that each tensor's chunks tile it and that each item lies inside a file of the folder.

    Raises CheckpointError that names file and tensor.
    """
    folder = Path(folder)
    _check_backend(folder)
    stored = _read_metadata(folder / METADATA_FILE)
    items = {index: _item(info) for index, info in stored.storage_data.items()}
    _check_files(folder, [(index.fqn, item) for index, item in items.items()])
    tensors, objects = {}, {}
    for key, entry in stored.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            chunks = tuple(_chunk(folder, key, chunk, items) for chunk in entry.chunks)
            tensors[key] = DistributedTensor(shape=tuple(entry.size), dtype=entry.properties.dtype, chunks=chunks)
            if (fault := chunks_fault(tensors[key].shape, [chunk.rectangle for chunk in chunks])) is not None:
                raise CheckpointError(f"{folder / METADATA_FILE}: the chunks of {key} do not make it once: {fault}")
        else:
            item = items.get(metadata.MetadataIndex(key))
            if item is None:
                raise CheckpointError(f"{folder / METADATA_FILE}: lists {key} and does not say where it is stored")
            objects[key] = item
    return TorchDistIndex(folder=folder, tensors=tensors, objects=objects)


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_FILE
    try:
        written = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing: {folder} is not a whole Megatron checkpoint (torch_dist)") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error
    if not isinstance(written, dict) or written.get("sharded_backend") != "torch_dist":
        raise CheckpointError(f"{path}: says {written!r}; only Megatron's format torch_dist is read")


def _read_metadata(path: Path) -> metadata.Metadata:
    if not path.is_file():
        raise CheckpointError(f"{path}: the file is missing, so what the other files hold is not known")
    stored = load_listed(path.read_bytes(), str(path), METADATA_NAMES, _REAL_CLASSES)
    storage, entries = getattr(stored, "storage_data", None), getattr(stored, "state_dict_metadata", None)
    kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
    if (
        not isinstance(stored, metadata.Metadata)
        or not isinstance(storage, dict)
        or not isinstance(entries, dict)
        or not all(
            isinstance(index, metadata.MetadataIndex) and isinstance(info, filesystem._StorageInfo) for index, info in storage.items()
        )
        or not all(isinstance(key, str) and isinstance(entry, kinds) for key, entry in entries.items())
    ):
        raise CheckpointError(f"{path}: damaged, or not the metadata of a distributed checkpoint")
    return stored


def _item(info: filesystem._StorageInfo) -> StoredItem:
    return StoredItem(file=info.relative_path, position=info.offset, nbytes=info.length)


def _check_files(folder: Path, items: Sequence[tuple[str, StoredItem]]) -> None:
    sizes: dict[str, int] = {}
    for key, item in items:
        if item.file not in sizes:
            path = folder / item.file
            if path.parent != folder or not path.is_file():
                raise CheckpointError(f"{path}: the file is missing; it holds {key}")
            sizes[item.file] = path.stat().st_size
        if item.position < 0 or item.position + item.nbytes > sizes[item.file]:
            raise CheckpointError(
                f"{folder / item.file}: truncated: it has {sizes[item.file]} bytes, and {key} lies at "
                f"{item.position} to {item.position + item.nbytes}"
            )


def _chunk(folder: Path, key: str, chunk: metadata.ChunkStorageMetadata, items: dict[metadata.MetadataIndex, StoredItem]) -> StoredChunk:
    item = items.get(metadata.MetadataIndex(key, chunk.offsets))
    if item is None:
        raise CheckpointError(f"{folder / METADATA_FILE}: does not say where the chunk of {key} at {tuple(chunk.offsets)} is stored")
    return StoredChunk(file=item.file, position=item.position, nbytes=item.nbytes, offsets=tuple(chunk.offsets), shape=tuple(chunk.sizes))


def chunks_fault(shape: Sequence[int], boxes: Sequence[Rectangle]) -> str | None:
    """As `tiling_fault`, of thousands of boxes: those that begin and end alike along the first dimension are one group (a layer)."""
    if not prod(shape):
        return None
    groups: dict[tuple[int, int], list[Rectangle]] = defaultdict(list)
    for box in boxes:
        if len(box.starts) != len(shape):
            return f"{box} has another number of dimensions than {tuple(shape)}"
        if shape:
            groups[box.starts[0], box.stops[0]].append(Rectangle(box.starts[1:], box.stops[1:]))
    spans = [Rectangle((start,), (stop,)) for start, stop in sorted(groups)]
    if not shape or any(left.stops[0] > right.starts[0] for left, right in zip(spans, spans[1:], strict=False)):
        return tiling_fault(shape, boxes)
    if (fault := tiling_fault(shape[:1], spans)) is not None:
        return f"along the first dimension: {fault}"
    if len(shape) == 1:
        return next((f"[{span[0]}:{span[1]}] comes twice" for span, inner in groups.items() if len(inner) > 1), None)
    for (start, stop), inner in groups.items():
        if (fault := chunks_fault(shape[1:], inner)) is not None:
            return f"at {start}:{stop} of the first dimension, {fault}"
    return None


def read_chunk(index: TorchDistIndex, key: str, chunk: StoredChunk) -> torch.Tensor:
    """The chunk of tensor `key`, in its shape: a view of a private memory map, so only what is touched is read.

    Raises CheckpointError where the item is not that tensor: damaged, of another shape or dtype, or with code in its pickle.
    """
    dtype = index.tensors[key].dtype
    window = map_item(index.folder, chunk)
    start = _storage_start(window, f"{index.folder / chunk.file}: {key} at {chunk.offsets}", chunk.shape, dtype)
    count = prod(chunk.shape)
    if not count:
        return torch.empty(chunk.shape, dtype=dtype)
    return torch.frombuffer(window.memory, dtype=dtype, count=count, offset=window.start + start).view(chunk.shape)


def check_chunk(index: TorchDistIndex, key: str, chunk: StoredChunk) -> None:
    """Raises CheckpointError where its bytes are not those that torch.save wrote, by the CRC-32 it took of them (it may take none)."""
    window = map_item(index.folder, chunk)
    source = f"{index.folder / chunk.file}: {key} at {chunk.offsets}"
    for place in storage_places(WindowFile(window), source).values():
        if place.crc32 and zlib.crc32(window.view()[place.position : place.position + place.nbytes]) != place.crc32:
            raise CheckpointError(f"{source} is not what was written (its CRC-32 differs); use another checkpoint")


@dataclass(frozen=True, kw_only=True)
class Window:
    """An item in memory: bytes [start, start + nbytes) of `memory`, which begins at a page of the file."""

    memory: mmap.mmap
    start: int
    nbytes: int

    def view(self) -> memoryview:
        return memoryview(self.memory)[self.start : self.start + self.nbytes]


def map_item(folder: Path, item: StoredItem) -> Window:
    """Raises CheckpointError where the file cannot be opened."""
    start = item.position % mmap.ALLOCATIONGRANULARITY
    try:
        with (folder / item.file).open("rb") as file:
            # Private, so that it counts as writable for torch, and nobody writes the file through it.
            memory = mmap.mmap(file.fileno(), item.nbytes + start, offset=item.position - start, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / item.file}: cannot be read: {error}") from error
    return Window(memory=memory, start=start, nbytes=item.nbytes)


class WindowFile(io.RawIOBase):
    """A window as a file to read from."""

    def __init__(self, window: Window) -> None:
        self._view, self._position = window.view(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._view)}[whence]
        if self._position < 0:
            raise OSError("a place before the beginning of the file")
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._view[self._position : self._position + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def _storage_start(window: Window, source: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Where in the item the elements begin, after proof that its pickle says one contiguous tensor of `shape` and `dtype`."""
    file = WindowFile(window)
    record = load_listed(read_pickle(file, source), source, DATA_NAMES)
    stored = tensor_record(record)
    if stored is None or not stored.is_contiguous:
        raise CheckpointError(f"{source}: the item is not a contiguous tensor")
    if (stored.shape, stored.dtype) != (shape, dtype):
        raise CheckpointError(
            f"{source}: the item has shape {stored.shape} and {stored.dtype}, and {METADATA_FILE} says {shape} and {dtype}: "
            "files were swapped or changed"
        )
    start, nbytes = storage_place(file, source, stored.storage)
    if stored.offset * dtype.itemsize + prod(shape) * dtype.itemsize > nbytes:
        raise CheckpointError(f"{source}: the item holds {nbytes} bytes, fewer than {shape} of {dtype} need")
    return start + stored.offset * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What a pickle of torch.save says of a tensor. storage: the name of its bytes in the zip. offset, stride: in elements."""

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Strides of dimensions of size 1 do not matter."""
        if not prod(self.shape):
            return True
        return all(
            size == 1 or stride == prod(self.shape[dim + 1 :])
            for dim, (size, stride) in enumerate(zip(self.shape, self.stride, strict=True))
        )


_STORAGE_DTYPES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}


def tensor_record(value: Any) -> TensorRecord | None:
    """None where `value`, of a pickle that was read with stand-ins, is no tensor."""
    if isinstance(value, Record) and value.name == "torch._utils._rebuild_parameter" and value.arguments:
        return tensor_record(value.arguments[0])
    if not isinstance(value, Record) or value.name != "torch._utils._rebuild_tensor_v2" or len(value.arguments) < 4:
        return None
    match value.arguments[:4]:
        case (("persistent", ("storage", kind, str(storage), _, _)), int(offset), tuple(shape), tuple(stride)):
            dtype = _STORAGE_DTYPES.get(getattr(kind, "name", ""))
            if dtype is None or offset < 0 or not all(isinstance(size, int) and size >= 0 for size in (*shape, *stride)):
                return None
            return TensorRecord(storage=storage, dtype=dtype, offset=offset, shape=tuple(shape), stride=tuple(stride))
    return None


def storage_place(file: Any, source: str, storage: str) -> tuple[int, int]:
    """(position, bytes) of one of the `storage_places`."""
    place = storage_places(file, source).get(storage)
    if place is None:
        raise CheckpointError(f"{source}: damaged: storage {storage} is not in the item")
    return place.position, place.nbytes


class StoragePlace(NamedTuple):
    """Bytes in a file that torch.save wrote: not compressed, so they can be used where they lie. crc32: 0 where none was taken."""

    position: int
    nbytes: int
    crc32: int


def storage_places(file: Any, source: str) -> dict[str, StoragePlace]:
    """name -> place, of every storage in what torch.save wrote. Raises CheckpointError where it is not such a file."""
    places = {}
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if entry.filename.count("/") != 2 or "/data/" not in entry.filename or entry.compress_type != zipfile.ZIP_STORED:
                    continue
                places[entry.filename.rpartition("/")[2]] = StoragePlace(entry_start(file, entry), entry.file_size, entry.CRC)
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{source}: damaged: {error}") from error
    return places
