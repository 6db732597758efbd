"""Loggers for metrics: console, JSON lines, TensorBoard, services, Prometheus and OpenTelemetry.

A logger that fails warns once and never ends a run. A run that resumes cuts the
logs after its checkpoint (`cut_after`).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megarl.config.rules.machine import logger_problem
from megarl.config.schema import LoggerKind
from megarl.machine.files import write_whole
from megarl.machine.strict_json import dump_readable
from megarl.tracking.metrics_file import parse_line
from megarl.tracking.progress import readable
from megarl.tracking.run_files import GENERATIONS_FILE, METRICS_FILE, STATUS_FILE, check_run_folder, writing
from megarl.tracking.samples import SAMPLES_FOLDER, SampleTable, SampleWriter, remove_samples
from megarl.tracking.services import (
    BackgroundLogger,
    MlflowService,
    SwanLabService,
    WandbService,
    end_wandb_process,
)
from megarl.tracking.timeline import Span
from megarl.tracking.tracked_run import RUN_IDS, Logger, TrackedRun

TENSORBOARD_FOLDER = "tensorboard"

_log = logging.getLogger(__name__)
_EVENT_FILES = "events.out.tfevents.*"


class ConsoleLogger(Logger):
    """Prints one line per step with the headline metrics and the estimated time left.

    The files contain all metrics.
    """

    # Metric -> its name on the line and its unit.
    SHOWN: Mapping[str, tuple[str, str]] = {
        "distillation/reverse_kl/mean": ("teacher_kl", ""),
        "actor/top_k_kl": ("teacher_top_k_kl", ""),
        "reward/mean": ("reward", ""),
        "val/score/mean": ("val/score", ""),
        "sft/loss": ("loss", ""),
        "dpo/loss": ("loss", ""),
        "reward_model/loss": ("loss", ""),
        "dpo/accuracy": ("accuracy", ""),
        "reward_model/accuracy": ("accuracy", ""),
        "val/loss": ("val/loss", ""),
        "val/accuracy": ("val/accuracy", ""),
        "actor/reward_kl_penalty": ("kl_penalty", ""),
        "actor/kl_loss": ("kl_loss", ""),
        "actor/entropy": ("entropy", ""),
        "actor/lr": ("lr", ""),
        "sft/lr": ("lr", ""),
        "dpo/lr": ("lr", ""),
        "reward_model/lr": ("lr", ""),
        "actor/grad_norm": ("grad_norm", ""),
        "sft/grad_norm": ("grad_norm", ""),
        "dpo/grad_norm": ("grad_norm", ""),
        "reward_model/grad_norm": ("grad_norm", ""),
        "response_length/mean": ("response", " tokens"),
        "perf/throughput": ("throughput", " tokens/s"),
        "timing_s/step": ("time", " s"),
    }

    OF_REWARDS = ("reward/mean", "val/score/mean")

    def __init__(self, run: TrackedRun, write: Callable[[str], None] = print) -> None:
        self._write = write
        self._total_steps = run.total_steps
        # The scores of samples that nothing scores are 0.
        self._shown = {
            key: shown for key, shown in self.SHOWN.items() if run.has_rewards or key not in self.OF_REWARDS
        }
        self._seconds: list[float] = []  # of each step so far

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        shown = [
            f"{name} {readable(metrics[key], 4)}{unit}"
            for key, (name, unit) in self._shown.items()
            if key in metrics
        ]
        # Estimate the time left from the steps so far.
        if "timing_s/step" in metrics:
            self._seconds.append(metrics["timing_s/step"])

        if self._seconds and self._total_steps is not None and step < self._total_steps:
            # The first step includes warm-up, so alone it only gives a bound.
            usual = self._seconds[1:] or self._seconds
            bound = "" if len(self._seconds) > 1 else "up to "
            shown.append(f"{bound}{_duration(sum(usual) / len(usual) * (self._total_steps - step))} left")

        total = "" if self._total_steps is None else f"/{self._total_steps}"
        self._write(f"step {step}{total}  " + "  ".join(shown))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


class JsonlLogger(Logger):
    """Appends each step to `metrics.jsonl`, readable during the run.

    A line is {"step": ..., "<metric>": ...}.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.output_dir / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, failed: bool) -> None:
        self._file.close()


class TensorBoardLogger(Logger):
    """Writes one event file per process of the run.

    TensorBoard ignores the old events of a step that is repeated.
    """

    def __init__(self, run: TrackedRun) -> None:
        first_step = None if run.resumed_after is None else run.resumed_after + 1
        self._writer = SummaryWriter(str(run.output_dir / TENSORBOARD_FOLDER), purge_step=first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def _service(
    library: str, client: Callable[[TrackedRun], Logger], abandon: Callable[[], None] = lambda: None
) -> Callable[[TrackedRun], Logger]:
    """Return what opens a service in the background. Its library is imported first, in the run's thread."""

    def open_service(run: TrackedRun) -> Logger:
        importlib.import_module(library)
        return BackgroundLogger(partial(client, run), abandon)

    return open_service


def _prometheus(run: TrackedRun) -> Logger:
    from megarl.tracking.prometheus_endpoint import PrometheusEndpoint

    return PrometheusEndpoint(run)


def _opentelemetry(run: TrackedRun) -> Logger:
    from megarl.tracking.trace_export import OpenTelemetryTraces

    return OpenTelemetryTraces(run)


# The package of a service is imported only if a run uses it.
LOGGERS: dict[LoggerKind, Callable[[TrackedRun], Logger]] = {
    LoggerKind.console: ConsoleLogger,
    LoggerKind.jsonl: JsonlLogger,
    LoggerKind.tensorboard: TensorBoardLogger,
    LoggerKind.wandb: _service("wandb", WandbService, end_wandb_process),
    LoggerKind.mlflow: _service("mlflow", MlflowService),
    LoggerKind.swanlab: _service("swanlab", SwanLabService),
    LoggerKind.prometheus: _prometheus,
    LoggerKind.opentelemetry: _opentelemetry,
}


class Tracker:
    """Sends the metrics of a step to every logger in `names`.

    Raises:
        ValueError: A logger name is unknown, or the package of a service is not installed.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        kinds = [LoggerKind(name) for name in names]
        # Fail now, not after the first step, if a service is missing or not configured.
        if problems := [problem for kind in kinds if (problem := logger_problem(kind))]:
            raise ValueError(f"tracking.loggers: {'; '.join(problems)}")
        run.output_dir.mkdir(parents=True, exist_ok=True)
        self._output_dir = run.output_dir
        self._samples = SampleWriter(run.output_dir)
        self._loggers: dict[str, Logger] = {}
        self._failed: set[str] = set()

        for kind in kinds:
            self._guarded(kind.value, partial(self._open, kind, run))

    def _open(self, kind: LoggerKind, run: TrackedRun) -> None:
        self._loggers[kind.value] = LOGGERS[kind](run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step.

        Raises:
            RunError: The run's folder no longer exists, so the output would be lost.
        """
        check_run_folder(self._output_dir)
        for name, logger in self._loggers.items():
            self._guarded(name, partial(logger.log, metrics, step))

    def log_spans(self, step: int, phases: Sequence[Span]) -> None:
        """Send the phases of a step, and the step itself as the phase `step`."""
        for name, logger in self._loggers.items():
            self._guarded(name, partial(logger.log_spans, step, phases))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append {"step": ..., **row} per row to `generations.jsonl`, and send the rows to services.

        Raises:
            RunError: The run's folder no longer exists, or the file cannot be written.
        """
        check_run_folder(self._output_dir)
        for name, logger in self._loggers.items():
            if rows:
                self._guarded(name, partial(logger.log_generations, step, rows))

        # Sync the file to disk, so that the samples survive a machine crash.
        with (
            writing(self._output_dir),
            (self._output_dir / GENERATIONS_FILE).open("a", encoding="utf-8") as file,
        ):
            file.writelines(dump_readable({"step": step, **row}, default=str) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())

    def log_samples(self, step: int, make: Callable[[], SampleTable], max_bytes: int) -> None:
        """Write the step's file in `samples/` in the background; see SampleWriter."""
        self._guarded(SAMPLES_FOLDER, lambda: self._samples.write(step, make, max_bytes))

    def flush(self, services: bool = True) -> None:
        """Make everything logged so far durable, however the process ends.

        Args:
            services: Whether this includes services, which may take seconds.
        """
        self._guarded(SAMPLES_FOLDER, self._samples.flush)
        for name, logger in self._loggers.items():
            if services or not isinstance(logger, BackgroundLogger):
                self._guarded(name, logger.flush)

    def close(self, failed: bool = False) -> None:
        self._guarded(SAMPLES_FOLDER, self._samples.close)
        for name, logger in self._loggers.items():
            self._guarded(name, lambda logger=logger: logger.close(failed))

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001
            # Boundary to third-party services: training continues without them.
            if name not in self._failed:
                _log.warning("tracking: %s failed; calls that fail are skipped from now on: %r", name, error)
            self._failed.add(name)


def cut_after(output_dir: Path, step: int) -> None:
    """Remove everything logged after `step`, and a partial line left by a kill.

    Each file is replaced atomically. Event files of TensorBoard stay: the next one names the step from which
    it replaces them (`TrackedRun.resumed_after`).

    Raises:
        ValueError: A file has a damaged line before its end.
    """
    for name in (METRICS_FILE, GENERATIONS_FILE):
        if (path := output_dir / name).exists():
            content = path.read_bytes()
            kept = b"".join(_lines_until(path, content, step))
            # Leave files without later steps untouched.
            if kept != content:
                write_whole(path, kept)
    remove_samples(output_dir, after=step)


def clear(output_dir: Path) -> None:
    """Remove all logs of the run, which starts over. Services treat it as a new run."""
    for name in (METRICS_FILE, GENERATIONS_FILE, STATUS_FILE):
        (output_dir / name).unlink(missing_ok=True)
    for path in (*(output_dir / TENSORBOARD_FOLDER).glob(_EVENT_FILES), *output_dir.glob(RUN_IDS)):
        path.unlink()
    remove_samples(output_dir, after=-1)


def _lines_until(path: Path, content: bytes, step: int) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if line.endswith(b"\n") and parse_line(path, number, line)["step"] <= step:
            yield line
