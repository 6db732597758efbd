"""Finds the metrics that the table of docs/tracking.md does not have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from docs.generate.metric_table import METRICS


@cache
def _known() -> re.Pattern[str]:
    return re.compile("|".join(_as_regex(row.pattern) for rows in METRICS.values() for row in rows))


def _as_regex(pattern: str) -> str:
    """Convert the pattern of a row to a regular expression."""
    text = (
        re.escape(pattern)
        .replace(r"\[", "(?:")
        .replace(r"\]", ")?")
        .replace(r"\{", "(?:")
        .replace(r"\}", ")")
        .replace(",", "|")
    )
    return re.sub(r"<\w+>", ".+", text)


def unknown_metrics(names: Iterable[str]) -> list[str]:
    """Return the names that no row of the table matches, sorted."""
    return sorted({name for name in names if _known().fullmatch(name) is None})
