"""Progress bar of a run: step, reward, KL if logged, tokens per second and time left."""

from __future__ import annotations

from collections.abc import Mapping
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

_OF_REWARDS = "critic/score/mean"
# Metric -> its short name on the bar. Metrics that a run does not log are left out.
SHOWN = {
    "distillation/reverse_kl/mean": "KL from the teacher",
    "actor/top_k_kl": "top-k KL from the teacher",
    _OF_REWARDS: "reward",
    "actor/reward_kl_penalty": "KL in the reward",
    "actor/kl_loss": "KL in the loss",
    "sft/loss": "loss",
    "dpo/loss": "loss",
    "reward_model/loss": "loss",
    "perf/throughput": "tokens/s",
}


def readable(value: float, digits: int) -> str:
    """Return a value with this many significant digits, and large ones as whole numbers."""
    return f"{value:,.0f}" if 10**digits - 0.5 <= abs(value) < 10**15 else f"{value:.{digits}g}"


class ProgressBar:
    """Live progress bar on a terminal.

    Nothing is drawn elsewhere (a log file), where the console logger prints lines.
    """

    def __init__(
        self, title: str, total_steps: int, console: Console, done: int = 0, has_rewards: bool = True
    ) -> None:
        """Create the bar.

        Args:
            done: Number of steps completed before the run was resumed.
            has_rewards: Whether anything scores the samples. Otherwise their scores, which are 0, are hidden.
        """
        self._shown = {name: short for name, short in SHOWN.items() if has_rewards or name != _OF_REWARDS}
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task(title, total=total_steps, completed=done, metrics="")

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Advance by one step, and show those of its metrics that fit on the bar."""
        shown = "  ".join(
            f"{short} {readable(metrics[name], 3)}" for name, short in self._shown.items() if name in metrics
        )
        self._progress.update(self._task, advance=1, metrics=shown)

    def show(self, num_done: int, text: str) -> None:
        """Show how many of the steps are done, and a text."""
        self._progress.update(self._task, completed=num_done, metrics=text)
