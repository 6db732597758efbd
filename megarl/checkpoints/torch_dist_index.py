"""Writes the files of a distributed checkpoint (torch_dist) that say where everything lies: `.metadata` and `common.pt`."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
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

from megarl.checkpoints.torch_dist import COMMON_FILE, METADATA_FILE, StoredChunk, StoredItem, chunks_fault
from megarl.config.errors import CheckpointError
from megarl.machine.files import write_whole

ITEM_ALIGNMENT = 64  # bytes; torch aligns a tensor within its item alike, so that it can be used where it lies in the file


@dataclass(frozen=True, kw_only=True)
class WrittenItem:
    """stored: a StoredChunk of a tensor of `shape` and `dtype`, or an object's StoredItem. checksum: xxh3_64 of its bytes."""

    key: str
    stored: StoredItem
    checksum: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


def write_index(folder: Path, items: Sequence[WrittenItem], common: dict[str, Any]) -> None:
    """`.metadata` and `common.pt` of the items of all ranks. Raises OSError; CheckpointError where they are not whole tensors."""
    buffer = io.BytesIO()
    torch.save(common, buffer)
    write_whole(folder / COMMON_FILE, buffer.getvalue())
    write_whole(folder / METADATA_FILE, pickle.dumps(_metadata(items)))


def _metadata(items: Sequence[WrittenItem]) -> Metadata:
    """As torch.distributed.checkpoint writes it."""
    chunks: dict[str, list[WrittenItem]] = defaultdict(list)
    for item in items:
        chunks[item.key].append(item)
    entries = {key: _entry(key, of_key) for key, of_key in chunks.items()}
    places = {
        MetadataIndex(item.key, item.stored.offsets if isinstance(item.stored, StoredChunk) else None): _StorageInfo(
            relative_path=item.stored.file, offset=item.stored.position, length=item.stored.nbytes
        )
        for item in items
    }
    return Metadata(state_dict_metadata=entries, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)


def _entry(key: str, items: Sequence[WrittenItem]) -> TensorStorageMetadata | BytesStorageMetadata:
    first = items[0]
    if first.dtype is None:
        assert len(items) == 1, f"several ranks have written {key}"
        return BytesStorageMetadata()
    assert all((item.shape, item.dtype) == (first.shape, first.dtype) for item in items), f"ranks do not agree on {key}"
    chunks = [item.stored for item in items if isinstance(item.stored, StoredChunk)]
    fault = chunks_fault(first.shape, [chunk.rectangle for chunk in chunks])
    if fault is not None:
        raise CheckpointError(f"the ranks have not written {key} once: {fault}")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=first.dtype),
        size=torch.Size(first.shape),
        chunks=[ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.shape)) for chunk in chunks],
    )
