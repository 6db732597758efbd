"""When something ran where: the unit of the timeline."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """`start_s` and `end_s` are seconds since the epoch on the worker's own clock."""

    pool: str
    role: str
    rank: int
    name: str
    start_s: float
    end_s: float
