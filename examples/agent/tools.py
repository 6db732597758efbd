"""Tool of the agent example: a price list that differs for each prompt, and that may be busy at first."""

from __future__ import annotations

import zlib
from typing import Annotated

from megarl.agents.protocol import Task


def price_of(item: str, list_number: int) -> str:
    """Return a two-digit price. Misspelled items have a price too, and price lists are unrelated."""
    return f"{zlib.crc32(f'{list_number} {item}'.encode()) % 100:02d}"


def price(item: Annotated[str, "two letters"], task: Task) -> str:
    """The price of an item, or that the list is busy."""
    was_asked = task.memory.get("was asked", False)
    task.memory["was asked"] = True
    if task.extra_info.get("busy", True) and not was_asked:  # `megarl generate` has no row of data
        return "busy"
    return price_of(item, task.extra_info.get("list", 0))
