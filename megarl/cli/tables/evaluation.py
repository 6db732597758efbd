"""The console output of an evaluation: its progress and its results."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from megarl.algorithms.sampling_metrics import Estimate
from megarl.machine.wording import counted
from megarl.trainers.evaluation_results import SourceComparison, SourceResult


class PassProgress:
    """Progress of one pass over the prompts, with the remaining time.

    It is a bar on a terminal, and a line per batch in a log.
    """

    def __init__(self, num_prompts: int, console: Console) -> None:
        self._num_prompts = num_prompts
        self._console = console

        columns = (
            TextColumn("[bold]prompts"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=num_prompts, score="")

        self._num_done = 0

    def __enter__(self) -> PassProgress:
        self._bar.start()
        self._start_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, num_prompts: int, mean_score: float) -> None:
        """Advance the progress.

        Args:
            num_prompts: Number of newly finished prompts.
            mean_score: Mean score of all samples so far.
        """
        self._num_done += num_prompts
        self._bar.update(self._task, advance=num_prompts, score=f"score {mean_score:.3g}")

        # A log has no bar, so each batch gets a line.
        if not self._console.is_terminal:
            left_s = (
                (time.monotonic() - self._start_s) / self._num_done * (self._num_prompts - self._num_done)
            )
            done = f"{self._num_done:,} of {counted(self._num_prompts, 'prompt')}"
            self._console.print(
                f"{done}, score {mean_score:.3g}, {left_s:.0f} s left", highlight=False, soft_wrap=True
            )


def print_result(
    source: str, result: SourceResult, comparison: SourceComparison | None, console: Console
) -> None:
    """Print the table of one data source.

    Args:
        comparison: The differences from the evaluation of `--against`; None if it lacks the data source.
    """
    size = (
        f"{counted(result.num_prompts, 'prompt')}, {counted(result.num_samples, 'sample')} of "
        f"{result.mean_tokens:.1f} tokens on average"
    )
    console.print(f"{source}: {size}, {result.truncated:.1%} truncated", highlight=False, soft_wrap=True)
    table = Table()

    for column in (
        "metric",
        "value",
        "standard error",
        *([] if comparison is None else ["difference", "its standard error"]),
    ):
        table.add_column(column, justify="left" if column == "metric" else "right")

    for name, estimate in result.metrics.items():
        cells = [f"{estimate.value:.4f}", _error(estimate)]
        if comparison is not None:
            difference = comparison.differences.get(name)
            cells += (
                ["only here", "-"] if difference is None else [f"{difference.value:+.4f}", _error(difference)]
            )
        table.add_row(name, *cells)

    console.print(table)


def _error(estimate: Estimate) -> str:
    return "-" if estimate.standard_error is None else f"{estimate.standard_error:.4f}"
