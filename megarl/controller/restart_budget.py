"""How many restarts a run allows within a window of time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """Restarts of the recent past. A rare fault never exhausts the budget, however long the run is.

    Args:
        limit: The number of restarts within the window.
        window_s: The length of the window in seconds; infinite: the whole run.
        now_s: The clock.
    """

    def __init__(
        self, limit: int, window_s: float = math.inf, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self.window_s = window_s
        self._now_s = now_s
        self._times_s: deque[float] = deque()
        self.num_restarts = 0  # of the whole run

    @property
    def left(self) -> int:
        """The number of restarts that are allowed now."""
        oldest_s = self._now_s() - self.window_s
        while self._times_s and self._times_s[0] <= oldest_s:
            self._times_s.popleft()
        return self.limit - len(self._times_s)

    def spend(self) -> None:
        """Record a restart."""
        assert self.left > 0
        self._times_s.append(self._now_s())
        self.num_restarts += 1

    def __str__(self) -> str:
        """Return the limit as text, such as "3 restarts within 86,400 s"."""
        within = "" if math.isinf(self.window_s) else f" within {self.window_s:,.0f} s"
        return f"{self.limit} restarts{within}"
