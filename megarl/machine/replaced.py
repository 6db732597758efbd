"""Replacement of entries of a mapping for the time of a block."""

from __future__ import annotations

from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(place: MutableMapping[str, Any], values: Mapping[str, Any]) -> Generator[None]:
    """Set entries in the block, and restore afterwards what was there before.

        with replaced(os.environ, {"RAY_AUTH_MODE": "token"}), replaced(vars(module), {"function": own}):
            ...

    Args:
        place: Environment variables, imported modules, or the names of a module.
    """
    before = {name: place[name] for name in values if name in place}
    place.update(values)

    try:
        yield
    finally:
        # Other threads may read an entry meanwhile, so one that was there is never missing.
        place.update(before)
        for name in values.keys() - before.keys():
            place.pop(name, None)
