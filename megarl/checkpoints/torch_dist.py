"""Reads Megatron's distributed checkpoint (torch_dist) as plain files.

No process group is needed, and no pickle is run.

A folder contains `.metadata` (the file and byte range of every tensor chunk and object),
`__<rank>_<n>.distcp` (concatenated items, each written by torch.save), `common.pt` and `metadata.json`.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megarl.checkpoints.torch_file import (
    PICKLE_DAMAGE,
    FilePart,
    check_stored,
    mapped,
    read_outline,
    refusal,
    stored_tensor,
)
from megarl.machine.errors import CheckpointError
from megarl.machine.files import parse_json
from megarl.weights.tensors import TensorSlice, chunks_fault

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
BACKEND_FILE = "metadata.json"
TORCH_DIST = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

_CLASSES = (
    *(
        set,
        frozenset,
        list,
        dict,
        tuple,
        bytes,
        bytearray,
        int,
        float,
        str,
        OrderedDict,
        defaultdict,
        torch.Size,
        PosixPath,
        PurePosixPath,
    ),
    *(
        planner.SavePlan,
        planner.WriteItem,
        planner.WriteItemType,
        planner.TensorWriteData,
        filesystem._StorageInfo,
    ),
    *(
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.ChunkStorageMetadata,
        metadata.BytesStorageMetadata,
    ),
    *(
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        torch.serialization._get_layout,
    ),
)
# Names that the pickle `.metadata` may reference. All of them contain data and run no code.
_METADATA_NAMES: dict[str, Any] = {f"{known.__module__}.{known.__name__}": known for known in _CLASSES} | {
    "pathlib._local.PosixPath": PosixPath,  # of newer Python versions
    # Classes of Megatron-Core 0.15.
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": metadata.Metadata,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": planner.SavePlan,
}


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that raises CheckpointError, with `source`, for a name that is not on the list."""

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data))
        self._source = source

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype | torch.layout):
            return dtype
        if (known := _METADATA_NAMES.get(f"{module}.{name}")) is None:
            raise CheckpointError(refusal(self._source, f"{module}.{name}"))
        return known


@dataclass(frozen=True, kw_only=True)
class StoredItem:
    """An item written by one torch.save: a chunk of a tensor, or an object.

    The item consists of bytes [position, position + nbytes) of `file`, a name in the folder.

    Attributes:
        offsets: The first index of a chunk in its tensor; None for an object.
        shape: The shape of a chunk.
        whole_shape: The shape of its tensor.
        dtype: None for an object.
        checksum: xxh3_64 of its bytes, if it was computed.
    """

    key: str
    file: str
    position: int
    nbytes: int
    offsets: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()
    whole_shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    checksum: str = ""

    @property
    def tensor_slice(self) -> TensorSlice:
        assert self.offsets is not None, f"{self.key} is an object"
        return TensorSlice(self.offsets, tuple(map(int.__add__, self.offsets, self.shape)))


@dataclass(frozen=True, kw_only=True)
class DistributedTensor:
    """A tensor in chunks that contain each of its elements once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredItem, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TorchDistIndex:
    """The contents of a checkpoint.

    `objects` are not tensors, such as the RNG states (`rng_state/shard_0.1_2.2`).
    """

    folder: Path
    tensors: dict[str, DistributedTensor]
    objects: dict[str, StoredItem]

    def items(self) -> Iterable[StoredItem]:
        """Yield every chunk and object."""
        for tensor in self.tensors.values():
            yield from tensor.chunks
        yield from self.objects.values()


def read_index(folder: str | Path) -> TorchDistIndex:
    """Read and verify `.metadata`.

    The chunks of each tensor must tile it, and each item must be inside a file of the folder.

    Raises:
        CheckpointError: Names the file and tensor.
    """
    folder = Path(folder)
    _check_backend(folder)
    stored = _read_metadata(folder / METADATA_FILE)
    items = {
        index: StoredItem(key=index.fqn, file=info.relative_path, position=info.offset, nbytes=info.length)
        for index, info in stored.storage_data.items()
    }
    _check_files(folder, items.values())
    tensors = {}
    objects = {}

    for key, entry in stored.state_dict_metadata.items():
        # The chunks of a tensor must tile it; an object only needs a location.
        if isinstance(entry, metadata.TensorStorageMetadata):
            shape = tuple(entry.size)
            dtype = entry.properties.dtype
            chunks = tuple(
                replace(_chunk(folder, key, chunk, items), whole_shape=shape, dtype=dtype)
                for chunk in entry.chunks
            )
            tensors[key] = DistributedTensor(shape=shape, dtype=dtype, chunks=chunks)
            if (fault := chunks_fault(shape, [chunk.tensor_slice for chunk in chunks])) is not None:
                raise CheckpointError(
                    f"{folder / METADATA_FILE}: the chunks of {key} do not cover it exactly once: {fault}"
                )
        else:
            item = items.get(metadata.MetadataIndex(key))
            if item is None:
                raise CheckpointError(f"{folder / METADATA_FILE}: lists {key} without its location")
            objects[key] = item

    return TorchDistIndex(folder=folder, tensors=tensors, objects=objects)


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_FILE
    try:
        written = parse_json(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: the file is missing: {folder} is not a complete Megatron checkpoint (torch_dist)"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from error

    # Megatron's other backends store their files differently.
    if not isinstance(written, dict) or written.get("sharded_backend") != "torch_dist":
        raise CheckpointError(f"{path}: contains {written!r}; only Megatron's format torch_dist is supported")


def _read_metadata(path: Path) -> metadata.Metadata:
    if not path.is_file():
        raise CheckpointError(f"{path}: the file is missing, so the contents of the other files are unknown")
    try:
        stored = _MetadataUnpickler(path.read_bytes(), str(path)).load()
    except PICKLE_DAMAGE as error:
        raise CheckpointError(
            f"{path}: damaged, its pickle cannot be read: {type(error).__name__}: {error}"
        ) from error

    # The pickle may contain any listed class anywhere, so check the types before they are used.
    storage = getattr(stored, "storage_data", None)
    entries = getattr(stored, "state_dict_metadata", None)
    kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)

    if (
        not isinstance(stored, metadata.Metadata)
        or not isinstance(storage, dict)
        or not isinstance(entries, dict)
        or not all(
            isinstance(index, metadata.MetadataIndex) and isinstance(info, filesystem._StorageInfo)
            for index, info in storage.items()
        )
        or not all(isinstance(key, str) and isinstance(entry, kinds) for key, entry in entries.items())
    ):
        raise CheckpointError(f"{path}: damaged, or not the metadata of a distributed checkpoint")

    return stored


def _check_files(folder: Path, items: Iterable[StoredItem]) -> None:
    sizes: dict[str, int] = {}
    for item in items:
        if item.file not in sizes:
            path = folder / item.file
            # A name that contains a path would lead out of the folder.
            if path.parent != folder or not path.is_file():
                raise CheckpointError(f"{path}: the file is missing; it contains {item.key}")
            sizes[item.file] = path.stat().st_size
        if item.position < 0 or item.position + item.nbytes > sizes[item.file]:
            raise CheckpointError(
                f"{folder / item.file}: truncated: it has {sizes[item.file]} bytes, but {item.key} is at "
                f"bytes {item.position} to {item.position + item.nbytes}"
            )


def _chunk(
    folder: Path,
    key: str,
    chunk: metadata.ChunkStorageMetadata,
    items: dict[metadata.MetadataIndex, StoredItem],
) -> StoredItem:
    item = items.get(metadata.MetadataIndex(key, chunk.offsets))
    if item is None:
        raise CheckpointError(
            f"{folder / METADATA_FILE}: does not contain the location of the chunk of {key} at "
            f"{tuple(chunk.offsets)}"
        )

    return replace(item, offsets=tuple(chunk.offsets), shape=tuple(chunk.sizes))


def read_chunk(folder: Path, chunk: StoredItem) -> torch.Tensor:
    """Return a chunk of a tensor as a view of a private memory map.

    Only accessed elements are read.

    Raises:
        CheckpointError: The item is not that tensor: it is damaged, has another shape or dtype, or its pickle
            contains code.
    """
    source = f"{folder / chunk.file}: {chunk.key} at {chunk.offsets}"
    with open_item(folder, chunk) as item:
        stored = stored_tensor(read_outline(item, source))
    if stored is None:
        raise CheckpointError(f"{source}: the item is not a contiguous tensor")

    # The item describes itself, so swapped files are detected even if their sizes agree.
    if (stored.shape, stored.dtype) != (chunk.shape, chunk.dtype):
        raise CheckpointError(
            f"{source}: the item has shape {stored.shape} and {stored.dtype}, but {METADATA_FILE} specifies "
            f"{chunk.shape} and {chunk.dtype}: files were swapped or changed"
        )

    # A map past the end of the item would read elements of the next one.
    if stored.end > chunk.nbytes:
        raise CheckpointError(
            f"{source}: the item has {chunk.nbytes} bytes, fewer than {stored.shape} of {stored.dtype} need"
        )

    return mapped(folder / chunk.file, chunk.position + stored.position, stored.shape, stored.dtype)


def check_chunk(folder: Path, chunk: StoredItem) -> None:
    """Check the bytes of a chunk against the CRC-32 that torch.save computed, if any.

    Raises CheckpointError if they differ.
    """
    source = str(folder / chunk.file)
    name = f"{chunk.key} at {chunk.offsets}"

    with open_item(folder, chunk) as item:
        stored = stored_tensor(read_outline(item, f"{source}: {name}"))
        check_stored(item, source, {} if stored is None else {name: stored})


def open_item(folder: Path, item: StoredItem) -> FilePart:
    """Open an item for reading. Raises CheckpointError if the file cannot be opened."""
    path = folder / item.file
    try:
        return FilePart(path, item.position, item.nbytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
