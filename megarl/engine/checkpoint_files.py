"""Writes a rank's part of a checkpoint in the background, and the files that say where everything lies.

The files are those of Megatron's `torch_dist`. Its own writer forks processes that have threads and keeps a server for their results;
this one is a thread, and takes the checksums of what it writes.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

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

from megarl.config.errors import CheckpointError
from megarl.protocol.whole_file import write_whole
from megarl.resharding.torch_dist import COMMON_FILE, METADATA_FILE, StoredChunk, StoredItem, chunks_fault

ITEM_ALIGNMENT = 64  # bytes; torch aligns a tensor within its item alike, so that it can be used where it lies in the file


@dataclass(frozen=True, kw_only=True)
class HostItem:
    """To be written. data: a tensor that owns its memory; offsets: its place in the whole tensor, which has `shape`. Else an object."""

    key: str
    data: Any
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WrittenItem:
    """stored: a StoredChunk of a tensor of `shape` and `dtype`, or an object's StoredItem. checksum: xxh3_64 of its bytes."""

    key: str
    stored: StoredItem
    checksum: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class _HashedFile(io.RawIOBase):
    """Passes bytes on to a file and hashes them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = xxhash.xxh3_64()
        self.nbytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self.hash.update(view)
        self._file.write(view)
        self.nbytes += view.nbytes
        return view.nbytes


class BackgroundWriter:
    """Writes items, back to back, into one file. Their memory is given back as they are written."""

    def __init__(self, path: Path, items: list[HostItem]) -> None:
        self._path = path
        self._items = items
        self._written: list[WrittenItem] = []
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {path.name}", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        """Also where it has failed."""
        return not self._thread.is_alive()

    def wait(self) -> tuple[list[WrittenItem], str | None]:
        """What was written, and what went wrong, in one line."""
        self._thread.join()
        return self._written, self._failure

    def _run(self) -> None:
        try:
            if self._items:
                self._write()
        except Exception as error:  # noqa: BLE001  (the boundary of a thread: whoever waits for it raises it)
            reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
            self._failure = f"{self._path}: cannot be written: {reason}"
        finally:
            self._items.clear()

    def _write(self) -> None:
        with self._path.open("wb", buffering=2**20) as file:
            self._items.reverse()
            while self._items:
                self._written.append(self._write_item(file, self._items.pop()))
            file.flush()
            os.fsync(file.fileno())

    def _write_item(self, file: BinaryIO, item: HostItem) -> WrittenItem:
        file.write(bytes(-file.tell() % ITEM_ALIGNMENT))
        position, hashed = file.tell(), _HashedFile(file)
        torch.save(item.data, hashed)
        place: dict[str, Any] = {"file": self._path.name, "position": position, "nbytes": hashed.nbytes}
        checksum = hashed.hash.hexdigest()
        if not isinstance(item.data, Tensor):
            return WrittenItem(key=item.key, stored=StoredItem(**place), checksum=checksum)
        chunk = StoredChunk(**place, offsets=item.offsets, shape=tuple(item.data.shape))
        return WrittenItem(key=item.key, stored=chunk, checksum=checksum, shape=item.shape, dtype=item.data.dtype)


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
