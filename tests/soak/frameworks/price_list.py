"""The price list of examples/agent, as the programs of this folder use it: without megarl."""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any


class PriceList:
    """The price list of one task. It may be busy when it is first asked."""

    def __init__(self, number: int, is_busy: bool) -> None:
        self._number = number
        self._is_busy = is_busy

    def price(self, item: str) -> str:
        """The price of an item, or that the list is busy.

        Args:
            item: two letters
        """
        if self._is_busy:
            self._is_busy = False
            return "busy"
        return self.price_of(item)

    def price_of(self, item: str) -> str:
        return f"{zlib.crc32(f'{self._number} {item}'.encode()) % 100:02d}"


def read_task() -> tuple[str, str, dict[str, Any]]:
    """Return the item of the task on standard input, the right answer, and the row's further fields."""
    task = json.loads(sys.stdin.readline())
    return task["messages"][-1]["content"], task["ground_truth"], task["extra_info"]


def print_reward(is_right: bool) -> None:
    print(json.dumps({"reward": float(is_right)}))
