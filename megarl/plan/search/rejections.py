"""Counts of what a search considered and why it was left out."""

from __future__ import annotations

from collections import Counter
from enum import Enum


class Reason(str, Enum):
    """Why something was left out of a search."""

    divisibility = "divisibility"  # a size of the model does not divide over the ranks
    node = "node boundary"  # a tensor-parallel group does not fit on a node
    rules = "rules"  # another rule of `megarl check`
    memory = "memory"  # a device would exceed its memory
    dominated = "no smaller and no faster"  # than another variant of the same layout
    slower = "slower"  # its lower bound exceeds the best results


class Rejections:
    """Counts what was considered at each level of a search, and why the rest was left out.

    The levels are layouts of a model, their variants, and complete configurations. At each level, the number
    considered is the number kept plus the numbers rejected.

    Attributes:
        considered: The number of things that were considered, by level.
        rejected: The number of rejections, by level and reason.
    """

    def __init__(self) -> None:
        self.considered: Counter[str] = Counter()
        self.rejected: Counter[tuple[str, Reason]] = Counter()
        self._examples: dict[tuple[str, Reason], str] = {}

    def consider(self, level: str, count: int = 1) -> None:
        self.considered[level] += count

    def reject(self, level: str, reason: Reason, example: str = "", count: int = 1) -> None:
        """Count a rejection of something that has been considered. The first example is kept."""
        if count:
            self.rejected[level, reason] += count
            self._examples.setdefault((level, reason), example)

    def kept(self, level: str) -> int:
        """Return how many things of a level were not rejected."""
        return self.considered[level] - sum(
            count for (name, _), count in self.rejected.items() if name == level
        )

    def example(self, level: str, reason: Reason) -> str:
        """Return the first example of a rejection; empty if there is none."""
        return self._examples.get((level, reason), "")
