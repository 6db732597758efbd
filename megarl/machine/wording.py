"""Formats numbers and values in messages. This module uses only the standard library."""

from __future__ import annotations

import reprlib
from dataclasses import fields, is_dataclass
from enum import Enum

_LONGEST = 60  # characters of a text in a message
_short = reprlib.Repr(maxlevel=3, maxdict=4, maxlist=4, maxstring=_LONGEST, maxlong=40, maxother=_LONGEST)


def in_short(value: object) -> str:
    """Return a value from outside as a message contains it, without the middle of what is long."""
    return _short.repr(value)


def named(name: str) -> str:
    """Return a name from outside as a message contains it: as it is, unless it is long."""
    return name if len(name) <= _LONGEST else in_short(name)


def counted(number: int, name: str) -> str:
    """Return a number with its noun, such as `1 rank`, `2 ranks` and `1,000 micro-batches`."""
    plural = f"{name}es" if name.endswith(("s", "ch")) else f"{name}s"
    if name.endswith("ry"):
        plural = f"{name[:-1]}ies"
    return f"{number:,} {name if number == 1 else plural}"


def byte_unit(nbytes: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit in which a size is readable: GiB, MiB or KiB."""
    units = ((2**30, "GiB"), (2**20, "MiB"))
    return next((unit for unit in units if nbytes >= unit[0]), (2**10, "KiB"))


def sized(nbytes: float, decimals: int = 1) -> str:
    """Return a size with its unit, such as `1.5 GiB`, `20.0 MiB` and `0.5 KiB`."""
    unit, name = byte_unit(nbytes)
    return f"{nbytes / unit:,.{decimals}f} {name}"


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
