"""Weights & Biases client.

WANDB_API_KEY, WANDB_BASE_URL and WANDB_MODE (online, offline) in the environment select the destination.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import wandb

from megarl.tracking.tracked_run import TrackedRun

_NAME = "wandb"
_SERVICE_PROCESS = "wandb-core"
_INIT_LIMIT_S = 60


class WandbService:
    """W&B run with its files in `wandb/` of the output folder.

    A resumed run continues it. Steps that it already has are not logged again: W&B ignores steps below its
    last one.
    """

    def __init__(self, run: TrackedRun) -> None:
        run_id = run.run_id(_NAME) or uuid.uuid4().hex[:8]
        settings = wandb.Settings(console="off", silent=True, save_code=False, init_timeout=_INIT_LIMIT_S)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.output_dir),
            id=run_id,
            resume="allow",
            config=dict(run.config),
            settings=settings,
        )

        run.keep_run_id(_NAME, run_id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = list(rows[0])
        table = wandb.Table(
            columns=[*columns], data=[[_cell(row[column]) for column in columns] for row in rows]
        )
        self._run.log({"generations": table}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _cell(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else str(value)


def end_process() -> None:
    """Kill W&B's own process, for which this process would otherwise wait at exit.

    Data that it has not sent is in `wandb/`; upload it with `wandb sync`.
    """
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if _SERVICE_PROCESS in " ".join(child.cmdline()):
                child.kill()
