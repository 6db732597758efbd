"""Read the files that W&B wrote offline: a log of records in LevelDB's format, each a message of W&B's own
protocol."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record

_FILE_HEADER = 7
_BLOCK = 32 * 1024
_HEADER = 7
_FULL = 1
_FIRST = 2
_LAST = 4


def read_records(path: Path) -> list[Record]:
    # imported here, since every worker of pytest-xdist imports all test modules
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(content) for content in _contents(path.read_bytes())]


def _contents(data: bytes) -> Iterator[bytes]:
    """Yield the fragments of records. A record may span fragments; a block ends with zeros where no header
    fits."""
    position = _FILE_HEADER
    parts = b""

    while position + _HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        fragment = data[position + _HEADER : position + _HEADER + length]
        if len(fragment) < length:  # still being written
            return
        position += _HEADER + length
        parts = fragment if kind in (_FULL, _FIRST) else parts + fragment
        if kind in (_FULL, _LAST):
            yield parts
