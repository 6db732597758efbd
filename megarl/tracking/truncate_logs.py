"""Truncate a run's log files after a step.

A resumed run then leaves the same logs as an uninterrupted one.

TensorBoard files are left as they are: the next event file specifies the step from which it replaces them
(`TrackedRun.resumed_after`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.machine.files import parse_json, write_whole
from megarl.tracking.loggers import TENSORBOARD_FOLDER
from megarl.tracking.run_files import GENERATIONS_FILE, METRICS_FILE, STATUS_FILE
from megarl.tracking.samples import remove_samples
from megarl.tracking.tracked_run import RUN_IDS

_EVENT_FILES = "events.out.tfevents.*"


def cut_after(output_dir: Path, step: int) -> None:
    """Remove everything logged after `step`, and a partial line left by a kill.

    Each file is replaced atomically.

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
        if line.endswith(b"\n") and _step_of(path, number, line) <= step:
            yield line


def _step_of(path: Path, number: int, line: bytes) -> int:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); fix or delete that line") from error

    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int):
        raise ValueError(
            f"{path}, line {number}: expected an object with an integer 'step', found {str(record)[:60]!r}; "
            f"fix or delete that line"
        )
    return step
