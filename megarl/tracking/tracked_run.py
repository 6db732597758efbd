"""What a logger knows of the run that it logs, and by what it finds it again when the run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.config.compare import flat
from megarl.machine.files import write_whole

RUN_IDS = ".*.run_id"  # in `trainer.output_dir`


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """config: to be shown beside the metrics; plain values by section. It holds no key of any service: those
    are in the environment.

    total_steps: after which it ends, where that is known.
    resumed_after: the step after which this process continues with the run; what an earlier one logged for
    later steps is given up.
    """

    output_dir: Path
    project: str = "megarl"
    name: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    resumed_after: int | None = None

    def run_id(self, service: str) -> str | None:
        """That an earlier process of this run has kept."""
        path = self._path(service)
        return path.read_text(encoding="utf-8").strip() if path.exists() else None

    def keep_run_id(self, service: str, run_id: str) -> None:
        write_whole(self._path(service), run_id + "\n")

    def _path(self, service: str) -> Path:
        return self.output_dir / RUN_IDS.replace("*", service)

    def settings(self) -> Iterator[tuple[str, Any]]:
        """Of `config`, by dotted key."""
        return flat(self.config)
