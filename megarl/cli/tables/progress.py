"""The progress of a command: one updated line on a terminal, otherwise a line per report."""

from __future__ import annotations

import time
from types import TracebackType

from megarl.cli.tables.console import output_console, print_line


class ProgressLine:
    """Prints the progress to standard error, so that the tables can be piped."""

    def __init__(self, begin: str) -> None:
        self._console = output_console(stderr=True)
        self._begin = begin
        self._status = self._console.status(begin)

    def __enter__(self) -> ProgressLine:
        self._begin_s = time.monotonic()
        if self._console.is_terminal:
            self._status.start()
        else:
            print_line(self._console, self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def show(self, text: str) -> None:
        """Show a text with the time that has elapsed since the begin."""
        line = f"{text}, {time.monotonic() - self._begin_s:.0f} s elapsed"
        if self._console.is_terminal:
            self._status.update(line)
        else:
            print_line(self._console, line)
