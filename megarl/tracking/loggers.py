"""Where metrics go: the console, a JSON-lines file, TensorBoard. A logger that fails warns once and never ends a run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

_log = logging.getLogger(__name__)


class Logger(Protocol):
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def flush(self) -> None:
        """All that was logged is on the disk, or with whom it is for."""

    def close(self) -> None: ...


class ConsoleLogger:
    """One line a step of what people look at first; all of it is in the files."""

    SHOWN = ("critic/score/mean", "val/score/mean", "sft/loss", "val/loss", "actor/reward_kl_penalty", "actor/entropy", "perf/throughput")

    def __init__(self, output_dir: Path, write: Callable[[str], None] = print) -> None:
        self._write = write

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        shown = [f"{name} {metrics[name]:.4g}" for name in self.SHOWN if name in metrics]
        self._write(f"step {step}  " + "  ".join(shown))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class JsonlLogger:
    """`metrics.jsonl`: {"step": ..., "<metric>": ...}, a line a step, readable while the run goes on."""

    def __init__(self, output_dir: Path) -> None:
        self._file = (output_dir / METRICS_FILE).open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    def __init__(self, output_dir: Path) -> None:
        self._writer = SummaryWriter(str(output_dir / TENSORBOARD_FOLDER))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


LOGGERS: dict[str, Callable[[Path], Logger]] = {"console": ConsoleLogger, "jsonl": JsonlLogger, "tensorboard": TensorBoardLogger}


class Tracker:
    """Sends a step's metrics to every logger that the run names. Raises ValueError for a name that does not exist."""

    def __init__(self, names: Sequence[str], output_dir: Path) -> None:
        unknown = [name for name in names if name not in LOGGERS]
        if unknown:
            raise ValueError(f"tracking.loggers: {unknown} are not loggers; there are {sorted(LOGGERS)}")
        output_dir.mkdir(parents=True, exist_ok=True)
        self._output_dir = output_dir
        self._loggers = {name: LOGGERS[name](output_dir) for name in names}
        self._failed: set[str] = set()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, logger in self._loggers.items():
            self._guarded(name, lambda logger=logger: logger.log(metrics, step))  # type: ignore[misc]

    def log_generations(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends to `generations.jsonl`: {"step": ..., **row} per row."""
        with (self._output_dir / GENERATIONS_FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **row}, ensure_ascii=False, default=str) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())

    def flush(self) -> None:
        """What was logged survives the end of the process, however it ends."""
        for name, logger in self._loggers.items():
            self._guarded(name, logger.flush)

    def close(self) -> None:
        for name, logger in self._loggers.items():
            self._guarded(name, logger.close)

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  (the boundary to other people's services: training goes on without them)
            if name not in self._failed:
                _log.warning("tracking.loggers: %s failed and is skipped from now on where it fails: %r", name, error)
            self._failed.add(name)
