"""By which a data set is known again, wherever its files are: what its rows say, in their order."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from typing import Any


class Fingerprint:
    """Of token ids and plain values, row after row."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, *token_ids: Sequence[int], values: Any = None) -> None:
        for ids in token_ids:
            self._digest.update(len(ids).to_bytes(8, "little") + array("q", ids).tobytes())
        self._digest.update(json.dumps(values, sort_keys=True, default=str).encode() + b"\n")

    def hex(self) -> str:
        return self._digest.hexdigest()
