"""Signals that end a run: SIGTERM, by which schedulers say that a job must leave, after its step and saved; Ctrl-C at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT  # exit statuses, as a shell gives them


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


class Interruption:
    """Ctrl-C within its block is KeyboardInterrupt the first time. Pressed again while the run's processes are ended it does not break into
    that, which would leave half of it undone; the third time this process ends where it is, and the others by themselves, as when it is
    killed. Where the signal is ignored, as by what a shell has started in the background, it stays so."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: Any = None
        self._times = 0

    def __enter__(self) -> None:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._times += 1
        if self._times == 1:
            raise KeyboardInterrupt
        if self._times > 2:
            os._exit(INTERRUPTED)
        self._say("Ctrl-C again: the run is being ended; once more leaves its processes to end by themselves")
