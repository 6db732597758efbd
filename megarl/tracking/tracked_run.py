"""Loggers, and the description of a run that they receive.

It contains the run ids by which a resumed run continues at a service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.dotted import flat
from megarl.machine.files import write_whole
from megarl.tracking.timeline import Span

RUN_IDS = ".*.run_id"  # in `trainer.output_dir`


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Description of the run that loggers receive.

    Attributes:
        config: Plain values by section, shown with the metrics. It contains no credentials; services read
            those from the environment.
        total_steps: Last step of the run, if known.
        has_rewards: Whether anything scores its samples; a distillation may do without.
        resumed_after: Last step of the checkpoint from which this process resumed. Log entries of an earlier
            process for later steps are discarded.
        now: Returns the step, None outside of steps, and the driver's innermost phase. Thread-safe.
        prometheus_host: Address of the endpoint for Prometheus.
        prometheus_port: Its port; 0: a free one.
        otlp_endpoint: Address of the collector for traces; None: by OpenTelemetry's variables.
    """

    output_dir: Path
    project: str = "megarl"
    name: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    has_rewards: bool = True
    resumed_after: int | None = None
    now: Callable[[], tuple[int | None, str | None]] = lambda: (None, None)
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 0
    otlp_endpoint: str | None = None

    def run_id(self, service: str) -> str | None:
        """Return the run id that an earlier process of this run stored for a service, or None."""
        path = self._path(service)
        return path.read_text(encoding="utf-8").strip() if path.exists() else None

    def keep_run_id(self, service: str, run_id: str) -> None:
        write_whole(self._path(service), run_id + "\n")

    def _path(self, service: str) -> Path:
        return self.output_dir / RUN_IDS.replace("*", service)

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Yield the values of `config` by dotted key."""
        return flat(self.config)


class Logger:
    """Receives what a run logs. A logger overrides the methods for what it shows or sends."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""

    def log_spans(self, step: int, phases: Sequence[Span]) -> None:
        """Log the phases of a step."""

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log samples of a validation, at least one."""

    def flush(self) -> None:
        """Make everything logged so far durable: on disk, or sent to the service."""

    def close(self, failed: bool) -> None:
        """Close the logger.

        Args:
            failed: Whether an error ended the run.
        """
