"""The progress of `megarl rehearse`: one updated line on a terminal, otherwise a line per finished phase."""

from __future__ import annotations

import time
from types import TracebackType

from megarl.cli.tables.console import output_console, print_line
from megarl.machine.wording import counted
from megarl.rehearsal.record import RankProgress


class RehearsalProgress:
    """Prints the progress to standard error, so that the tables can be piped."""

    def __init__(self, num_ranks: int) -> None:
        self._console = output_console(stderr=True)
        self._begin = f"rehearse: loading torch and Megatron-Core for {counted(num_ranks, 'rank')}"
        self._status = self._console.status(self._begin)
        self._num_ranks = num_ranks
        self._num_finished = 0

    def __enter__(self) -> RehearsalProgress:
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

    def report(self, progress: RankProgress) -> None:
        """Show the phase that a rank has finished."""
        elapsed = f"{time.monotonic() - self._begin_s:.0f} s elapsed"
        done = f"{self._num_finished} of {counted(self._num_ranks, 'rank')} done"
        line = f"rehearse: rank {progress.rank}: {progress.phase} finished; {done}, {elapsed}"

        if self._console.is_terminal:
            self._status.update(line)
        else:
            print_line(self._console, line)

    def rank_finished(self) -> None:
        """Count a rank whose record has arrived."""
        self._num_finished += 1
