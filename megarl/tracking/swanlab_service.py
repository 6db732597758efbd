"""SwanLab client.

SWANLAB_API_KEY and SWANLAB_MODE (cloud, local, offline) in the environment select the destination.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import swanlab

from megarl.machine.strict_json import dump_readable
from megarl.tracking.tracked_run import TrackedRun

_NAME = "swanlab"
_ID_LENGTH = 21


class SwanLabService:
    """SwanLab run with its files in `swanlog/` of the output folder. A resumed run continues it."""

    def __init__(self, run: TrackedRun) -> None:
        run_id = run.run_id(_NAME) or uuid.uuid4().hex[:_ID_LENGTH]
        swanlab.init(
            project=run.project,
            experiment_name=run.name,
            logdir=str(run.output_dir / "swanlog"),
            config=dict(run.config),
            id=run_id,
            resume="allow",
        )
        run.keep_run_id(_NAME, run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        swanlab.log(dict(metrics), step=step)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [swanlab.Text(dump_readable(row, default=str)) for row in rows]
        swanlab.log({"generations": texts}, step=step)

    def close(self, failed: bool) -> None:
        swanlab.finish()
