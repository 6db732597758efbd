"""Signals that end a run.

SIGTERM, which schedulers send, and Ctrl-C end it after its step and a checkpoint. A second signal ends it
immediately, as does Ctrl-C before the first step.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# Exit codes, as a shell reports them.
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
# Names of the causes.
SIGTERM = "SIGTERM"
CTRL_C = "Ctrl-C"


@contextmanager
def ends_by_signal(end_children: Callable[[], object]) -> Generator[None]:
    """Make SIGTERM, SIGHUP and Ctrl-C end the child processes before this process, within the block.

    SIGTERM and SIGHUP raise SystemExit with the status that a shell reports, Ctrl-C raises KeyboardInterrupt.
    Further signals do not interrupt the cleanup. `Termination` and `interruption` replace these handlers
    while a run is active.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Further signals must not interrupt the cleanup.
        for each in _ENDING:
            if signal.getsignal(each) is on_signal:
                signal.signal(each, lambda number, frame: None)
        end_children()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    with _handled_by(on_signal, _ENDING if is_main else ()):
        yield


@contextmanager
def _handled_by(
    on_signal: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals]
) -> Generator[None]:
    """Handle signals within the block. Ignored ones (nohup, background jobs of a shell) stay ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    handled = {number: each for number, each in before.items() if each is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


class Termination:
    """Records a request to end after the step: SIGTERM within its block, or what calls `request`.

    Enter it after Ray was started, which installs its own handler. The previous handler is restored at the
    end.

    Attributes:
        cause: The first request; empty if there is none.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: Any = None
        self.cause = ""

    def __enter__(self) -> Termination:
        self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @property
    def requested(self) -> bool:
        return bool(self.cause)

    @property
    def status(self) -> int:
        """The exit code of a run that was asked to end."""
        return INTERRUPTED if self.cause == CTRL_C else TERMINATED

    def request(self, cause: str) -> None:
        """Ask the run to end after its step and a checkpoint."""
        self.cause = cause
        self._say(
            f"{cause}: the run ends after this step and its checkpoint; a second {cause} ends it immediately"
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            self._say("SIGTERM again: exiting now, without saving")
            raise SystemExit(TERMINATED)
        self.request(SIGTERM)


@contextmanager
def interruption(
    say: Callable[[str], None], request_end: Callable[[], bool] = lambda: False
) -> Generator[None]:
    """Shut down a run in order on Ctrl-C or on loss of the terminal (SIGHUP), within the block.

    The first Ctrl-C asks the run to end after its step, if it can; the next one raises KeyboardInterrupt. A
    further one during the shutdown does not interrupt it. One more ends this process immediately; its child
    processes then end by themselves, as when it is killed.

    Args:
        say: Prints a line.
        request_end: Asks the run to end after its step; returns False if it cannot, or was asked before.
    """
    times = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal times
        if times == 0 and number == signal.SIGINT and request_end():
            return
        times += 1
        if times == 1 and number == signal.SIGHUP:
            raise SystemExit(128 + number)
        if times == 1:
            raise KeyboardInterrupt
        if times > 2:
            os._exit(INTERRUPTED)
        say("Ctrl-C again: the run is shutting down; one more Ctrl-C exits without waiting for its processes")

    with _handled_by(on_signal, (signal.SIGINT, signal.SIGHUP)):
        yield
