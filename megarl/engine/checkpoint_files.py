"""Writes a rank's part of a checkpoint in the background.

The files are those of Megatron's `torch_dist`. Its own writer forks processes that have threads and keeps a server for their results;
this one is a thread, and takes the checksums of what it writes.
"""

from __future__ import annotations

import io
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from megarl.checkpoints.torch_dist import StoredChunk, StoredItem
from megarl.checkpoints.torch_dist_index import ITEM_ALIGNMENT, WrittenItem


@dataclass(frozen=True, kw_only=True)
class HostItem:
    """To be written. data: a tensor that owns its memory; offsets: its place in the whole tensor, which has `shape`. Else an object."""

    key: str
    data: Any
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


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
