"""Formats numbers in messages. This module uses only the standard library."""

from __future__ import annotations


def counted(number: int, name: str) -> str:
    """Return a number with its noun, such as `1 rank`, `2 ranks` and `1,000 micro-batches`."""
    plural = f"{name}es" if name.endswith(("s", "ch")) else f"{name}s"
    if name.endswith("ry"):
        plural = f"{name[:-1]}ies"
    return f"{number:,} {name if number == 1 else plural}"
