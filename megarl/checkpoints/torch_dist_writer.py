"""Writes a distributed checkpoint (torch_dist).

A rank writes its items, each with torch.save. Further files locate the items of all ranks.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.checkpoints.torch_dist import COMMON_FILE, METADATA_FILE, StoredItem
from megarl.machine.errors import CheckpointError
from megarl.machine.files import write_whole
from megarl.weights.tensors import chunks_fault

# Bytes. torch uses the same alignment for a tensor within its item, so that it can be memory-mapped.
_ALIGNMENT = 64
_PART_BYTES = 2**20  # small enough to stay in a core's cache while it is hashed and written


class ItemToWrite(NamedTuple):
    """An item to write.

    Attributes:
        key: The name of the tensor or object.
        data: A tensor that owns its memory, or an object.
        whole_shape: The shape of the whole tensor.
        offsets: The position of `data` in the whole tensor.
    """

    key: str
    data: Any
    whole_shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


class _HashedFile(io.RawIOBase):
    """Writes bytes to a file and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxhash.xxh3_64()
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        for start in range(0, view.nbytes, _PART_BYTES):
            part = view[start : start + _PART_BYTES]
            self.hash.update(part)
            self._file.write(part)

        self.nbytes += view.nbytes
        return view.nbytes


def write_items(path: Path, items: Iterable[ItemToWrite], report: Callable[[StoredItem], None]) -> None:
    """Write the items to a file, one after another, and sync it to disk.

    Each item is requested when the previous one has been written.

    Raises:
        OSError: Contains the file's name.
    """
    try:
        with path.open("wb", buffering=_PART_BYTES // 16) as file:  # parts bypass the smaller buffer
            for item in items:
                report(_write_item(file, path.name, item))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None


def _write_item(file: BinaryIO, name: str, item: ItemToWrite) -> StoredItem:
    key, data, whole_shape, offsets = item
    # The padding belongs to no item, so neither the checksum nor the size includes it.
    file.write(bytes(-file.tell() % _ALIGNMENT))
    position = file.tell()
    hashed = _HashedFile(file)
    torch.save(data, hashed)  # pyrefly: ignore[bad-argument-type]  # torch only needs `write`
    stored = StoredItem(
        key=key, file=name, position=position, nbytes=hashed.nbytes, checksum=hashed.hash.hexdigest()
    )
    if not isinstance(data, Tensor):
        return stored
    return replace(
        stored, offsets=offsets, shape=tuple(data.shape), whole_shape=whole_shape, dtype=data.dtype
    )


def write_index(folder: Path, items: Sequence[StoredItem], common: dict[str, Any]) -> None:
    """Write `.metadata` and `common.pt` for the items of all ranks.

    Raises:
        OSError: A file cannot be written.
        CheckpointError: The items do not form complete tensors.
    """
    buffer = io.BytesIO()
    torch.save(common, buffer)
    write_whole(folder / COMMON_FILE, buffer.getvalue())
    write_whole(folder / METADATA_FILE, pickle.dumps(_metadata(items)))


def _metadata(items: Sequence[StoredItem]) -> Metadata:
    """Return the metadata in the form of torch.distributed.checkpoint."""
    # Collect the chunks of each tensor from all ranks.
    chunks: dict[str, list[StoredItem]] = defaultdict(list)
    for item in items:
        chunks[item.key].append(item)
    entries = {key: _entry(key, of_key) for key, of_key in chunks.items()}
    # A chunk is found by its offsets; an object has none.
    places = {
        MetadataIndex(item.key, item.offsets): _StorageInfo(
            relative_path=item.file, offset=item.position, length=item.nbytes
        )
        for item in items
    }

    return Metadata(
        state_dict_metadata=entries,
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _entry(key: str, items: Sequence[StoredItem]) -> TensorStorageMetadata | BytesStorageMetadata:
    first = items[0]
    if first.dtype is None:
        assert len(items) == 1, f"several ranks wrote {key}"
        return BytesStorageMetadata()

    # All ranks must describe the same whole tensor.
    assert all((item.whole_shape, item.dtype) == (first.whole_shape, first.dtype) for item in items), (
        f"ranks do not agree on {key}"
    )
    fault = chunks_fault(first.whole_shape, [item.tensor_slice for item in items])
    if fault is not None:
        raise CheckpointError(f"the ranks did not write {key} exactly once: {fault}")

    return TensorStorageMetadata(
        properties=TensorProperties(dtype=first.dtype),
        size=torch.Size(first.whole_shape),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(item.tensor_slice.starts), sizes=torch.Size(item.shape))
            for item in items
        ],
    )
