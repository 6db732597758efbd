"""How many restarts a run allows within a window of time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from megarl.machine.wording import counted


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

    def used_up(self, of: str = "") -> str:
        """Return the end of the message about a process that would need another restart.

        Args:
            of: What the restarts are of, such as " of this process".
        """
        within = "" if math.isinf(self.window_s) else f" within {self.window_s:,.0f} s"
        return (
            f"rollout.restart_limit: {counted(self.limit, 'restart')}{within}{of} "
            f"{'is' if self.limit == 1 else 'are'} used up. The cause is in the output above; if it is "
            "intermittent, allow more"
        )
