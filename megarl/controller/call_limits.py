"""Time limits of calls: a fixed one, and for some methods one that is learned from their earlier calls.

Calls of other methods, such as saving a checkpoint, may take much longer than before, but only while their
processes answer when they are asked what they are doing.
"""

from __future__ import annotations

import math
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
        factor: The multiple of the median duration after which a call counts as hung; 0: no limit is learned.
        floor_s: The smallest limit, and how long a process may not answer, in seconds.
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
        if self._learned.factor:
            self._seconds[method].append(seconds)

    @property
    def silence_s(self) -> float:
        """How long a process may not answer while a call takes unusually long."""
        return self.lost_s if self._learned.factor else math.inf

    @property
    def lost_s(self) -> float:
        """How long a process may not answer after another process has failed."""
        return self._learned.floor_s

    def limit_s(self, method: str | None) -> float:
        """Return how long a call of this method may run; None: any method."""
        usual_s = self._usual_s(method)
        if method not in self._learned.methods or usual_s is None:
            return self.fixed_s
        return min(self.fixed_s, usual_s)

    def look_s(self, method: str) -> float:
        """Return how long a call may run before its processes are asked whether they answer."""
        if not self._learned.factor:
            return self.fixed_s
        return min(self.fixed_s, self._usual_s(method) or self._learned.floor_s)

    def _usual_s(self, method: str | None) -> float | None:
        """Return how long a call takes at most, judged by earlier ones; None if there are too few."""
        seconds = self._seconds.get(method or "", ())
        if len(seconds) < _NUM_NEEDED:
            return None
        return max(self._learned.floor_s, self._learned.factor * median(seconds))
