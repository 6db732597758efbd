"""Formats numbers and values in messages. This module uses only the standard library."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum


def counted(number: int, name: str) -> str:
    """Return a number with its noun, such as `1 rank`, `2 ranks` and `1,000 micro-batches`."""
    plural = f"{name}es" if name.endswith(("s", "ch")) else f"{name}s"
    if name.endswith("ry"):
        plural = f"{name[:-1]}ies"
    return f"{number:,} {name if number == 1 else plural}"


def written(value: object) -> str:
    """Return a value as a configuration file contains it, such as `true`, `null` and `[a, b]`."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {written(inner)}' for name, inner in value.items())}}}"
    if is_dataclass(value):
        return written({entry.name: getattr(value, entry.name) for entry in fields(value)})
    return str(value)
