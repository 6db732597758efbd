"""The tool of the example: a list of prices that is another one for each prompt, and busy the first time that
some prompts ask it."""

from __future__ import annotations

import zlib
from typing import Annotated

from megarl.agents.protocol import Task


def price_of(item: str, list_number: int) -> str:
    """Two digits. Every item has a price, also one that is misspelt; no two lists have much in common."""
    return f"{zlib.crc32(f'{list_number} {item}'.encode()) % 100:02d}"


def price(item: Annotated[str, "two letters"], task: Task) -> str:
    """The price of an item, or that the list is busy."""
    was_asked = task.memory.get("was asked", False)
    task.memory["was asked"] = True
    if task.extra_info.get("busy", True) and not was_asked:  # in a terminal there is no row of data
        return "busy"
    return price_of(item, task.extra_info.get("list", 0))
