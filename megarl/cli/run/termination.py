"""Signals that end a run.

SIGTERM, which schedulers send, ends it after its step and a checkpoint. Ctrl-C ends it immediately.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Exit codes, as a shell reports them.
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def ends_by_signal(end_children: Callable[[], object]) -> Generator[None]:
    """Make SIGTERM, SIGHUP and Ctrl-C end the child processes before this process, within the block.

    SIGTERM and SIGHUP raise SystemExit with the status that a shell reports, Ctrl-C raises KeyboardInterrupt.
    Further signals do not interrupt the cleanup. Signals that are ignored (nohup, background jobs of a shell)
    stay ignored. `Termination` and `Interruption` replace these handlers while a run is active.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Further signals must not interrupt the cleanup.
        for each in handled:
            signal.signal(each, lambda number, frame: None)
        end_children()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    before = {number: signal.getsignal(number) for number in _ENDING if is_main}
    handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in handled:
        signal.signal(number, on_signal)

    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


class Termination:
    """Records SIGTERM within its block.

    Enter it after Ray was started, which installs its own handler. The previous handler is restored at the
    end.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: Any = None
        self.requested = False

    def __enter__(self) -> Termination:
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._say("SIGTERM again: exiting now, without saving")
            raise SystemExit(TERMINATED)
        self.requested = True
        self._say(
            "SIGTERM: the run ends after this step and its checkpoint; a second SIGTERM ends it immediately"
        )


class Interruption:
    """Shut down a run in order on Ctrl-C or on loss of the terminal (SIGHUP), within the block.

    The first Ctrl-C raises KeyboardInterrupt. A second one during the shutdown does not interrupt it. A third
    one ends this process immediately; its child processes then end by themselves, as when it is killed. A
    signal that is ignored (nohup, background jobs of a shell) stays ignored.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[signal.Signals, Any] = {}
        self._times = 0

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            if (handler := signal.getsignal(number)) is not signal.SIG_IGN:
                self._before[number] = handler
                signal.signal(number, self._on_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._times += 1
        if self._times == 1 and number == signal.SIGHUP:
            raise SystemExit(128 + number)
        if self._times == 1:
            raise KeyboardInterrupt
        if self._times > 2:
            os._exit(INTERRUPTED)
        self._say(
            "Ctrl-C again: the run is shutting down; a third Ctrl-C exits without waiting for its processes"
        )
