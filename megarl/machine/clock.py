"""How long something took, and when it was: the clock of the day, which may be set meanwhile, says only when
it began."""

from __future__ import annotations

import time


class Began:
    """A moment, by both clocks. start_s: seconds since the epoch."""

    def __init__(self) -> None:
        self.start_s = time.time()
        self._steady_s = time.monotonic()

    def seconds(self) -> float:
        """Since then."""
        return time.monotonic() - self._steady_s

    def now_s(self) -> float:
        """Seconds since the epoch, on the clock of that moment."""
        return self.start_s + self.seconds()
