"""Measures durations and times.

Durations use the monotonic clock, because the wall clock may be adjusted in the meantime.
"""

from __future__ import annotations

import time


class Began:
    """A moment on both clocks. `start_s` is in seconds since the epoch."""

    def __init__(self) -> None:
        self.start_s = time.time()
        self._steady_s = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since that moment."""
        return time.monotonic() - self._steady_s

    def now_s(self) -> float:
        """Return the current time in seconds since the epoch, on the wall clock as of that moment."""
        return self.start_s + self.seconds()
