"""Files in a node's memory that outlive the processes which write them.

One process holds the files; others open them by path, whatever the size of /dev/shm. The memory is released
when the holder ends, however it ends.

A file starts with a header that is zero while the file is written. It is set last, so a writer that dies
leaves a file that no reader accepts.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from typing import NamedTuple

_MAGIC = b"megarlsn"
_FIELDS = struct.Struct("<8sqqqq")
HEADER_BYTES = 64  # the contents begin here


class Header(NamedTuple):
    """The header of a complete file.

    Attributes:
        index_start: The first byte of the index, which ends the file.
        written_ns: When it was written, by the clock of the writer. This only tells files of a step that is
            repeated apart: clocks of nodes may differ.
    """

    step: int
    index_start: int
    index_bytes: int
    written_ns: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return self.index_start + self.index_bytes

    def encode(self) -> bytes:
        return _FIELDS.pack(_MAGIC, *self).ljust(HEADER_BYTES, b"\0")


def decode_header(data: bytes) -> Header | None:
    """Return the header at the start of a file, or None if the file is incomplete."""
    if len(data) < _FIELDS.size:
        return None
    magic, *fields = _FIELDS.unpack(data[: _FIELDS.size])
    return Header(*fields) if magic == _MAGIC else None


class MemoryFiles:
    """The files that this process holds, by name."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def path(self, name: str) -> str:
        """Return the path at which processes of this user on this node can open the file.

        A new file is empty.
        """
        if name not in self._descriptors:
            self._descriptors[name] = os.memfd_create(f"megarl-{name}", os.MFD_CLOEXEC)
        return f"/proc/{os.getpid()}/fd/{self._descriptors[name]}"

    def complete(self) -> dict[str, Header]:
        """Return the headers of the complete files."""
        # Other threads may create files meanwhile.
        headers = {
            name: decode_header(os.pread(descriptor, HEADER_BYTES, 0))
            for name, descriptor in self._descriptors.copy().items()
        }
        return {name: header for name, header in headers.items() if header is not None}

    def read(self, name: str, start: int, count: int) -> bytes:
        return os.pread(self._descriptors[name], count, start)

    def write(self, name: str, start: int, data: bytes) -> None:
        """Write bytes of a file, which is created if it does not exist."""
        self.path(name)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptors[name], view, start)
            start += written
            view = view[written:]

    def keep(self, names: Collection[str]) -> None:
        """Release the memory of all other files, which are empty then."""
        for name, descriptor in self._descriptors.items():
            if name not in names:
                os.ftruncate(descriptor, 0)
