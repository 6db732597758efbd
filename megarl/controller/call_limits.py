"""Time limits of calls: a fixed one, and for some methods one that is learned from their earlier calls."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from statistics import median
from typing import NamedTuple

_NUM_KEPT = 64  # the last durations of a method
_NUM_NEEDED = 4  # earlier calls before a limit is learned: the first ones compile and allocate


class LearnedLimits(NamedTuple):
    """The rule by which limits are learned.

    Attributes:
        methods: The methods whose calls take about equally long.
        factor: The multiple of the median duration after which a call counts as hung.
        floor_s: The smallest limit, in seconds.
    """

    methods: Collection[str] = ()
    factor: float = 0.0
    floor_s: float = 10.0


NOTHING_LEARNED = LearnedLimits()


class GroupLimits:
    """The limits of a group's calls.

    Attributes:
        fixed_s: The limit of any call, in seconds.
    """

    def __init__(self, fixed_s: float, learned: LearnedLimits) -> None:
        self.fixed_s = fixed_s
        self._learned = learned
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))

    def learn(self, method: str, seconds: float) -> None:
        """Take the duration of a call of one rank into account."""
        if self._learned.factor and method in self._learned.methods:
            self._seconds[method].append(seconds)

    def limit_s(self, method: str | None) -> float:
        """Return how long a call of this method may run; None: any method."""
        seconds = self._seconds.get(method or "", ())
        if len(seconds) < _NUM_NEEDED:
            return self.fixed_s
        return min(self.fixed_s, max(self._learned.floor_s, self._learned.factor * median(seconds)))
