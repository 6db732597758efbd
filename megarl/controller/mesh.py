"""Where a rank stands in its role's parallel layout."""

from __future__ import annotations

from typing import NamedTuple


class MeshCoordinate(NamedTuple):
    """Ranks with the same `dp` form one replica and work on the same rows."""

    dp: int
    tp: int = 0
    pp: int = 0
    cp: int = 0
