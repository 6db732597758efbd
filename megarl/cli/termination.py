"""SIGTERM, by which schedulers say that a job must leave: the run ends after the step that it is in, saved."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

TERMINATED = 128 + signal.SIGTERM  # the exit status, as a shell gives it


class Termination:
    """Listens within its block. Enter it after Ray was started, which takes the signal for itself; the handler that was there
    before comes back in the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: Any = None
        self.requested = False

    def __enter__(self) -> Termination:
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._say("SIGTERM again: ending now, without saving")
            raise SystemExit(TERMINATED)
        self.requested = True
        self._say("SIGTERM: this step is finished and saved, then the run ends; a second one ends it at once")
