"""Names of the files in a run's folder, `trainer.output_dir`, errors for writing them, and `scale.json`.

`megarl scale` writes `scale.json` atomically; the run takes it between two steps.

Files with their own format are named in the module that defines the format.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from megarl.machine.errors import UNWRITTEN, RunError
from megarl.machine.files import write_whole

METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"  # resolved
SUMMARY_FILE = "summary.json"  # only of a run that succeeded
FAILURE_FILE = "failure.txt"  # only of a run that failed
STACKS_FOLDER = "stacks"  # what each rank was doing when a call hung
STATUS_FILE = "status.json"  # current state of the run
REPORT_FILE = "report.html"
SCALE_FILE = "scale.json"  # how many replicas `megarl scale` asks for
_COUNT = "num_replicas"
MOST_REPLICAS = 10_000


def check_run_folder(output_dir: Path) -> None:
    """Raise RunError if the run's folder no longer exists, so that output is not lost silently."""
    if not output_dir.is_dir():
        raise RunError(
            f"{output_dir}: the run's folder was removed or replaced while the run was writing to it; the "
            "logs and checkpoints in it are lost. Start the run again, or restore the folder first to "
            "resume from its latest checkpoint"
        )


@contextmanager
def writing(output_dir: Path) -> Generator[None]:
    """Convert an OSError from writing to a run's folder to a RunError.

    The error names the file, or reports that the folder no longer exists.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, RunError):  # a rank that hangs is also a TimeoutError, which is an OSError
            raise
        check_run_folder(output_dir)
        raise RunError(
            f"{error.filename or output_dir}: cannot be written: {error.strerror or error}", hint=UNWRITTEN
        ) from error


def ask_for(run_dir: Path, num_replicas: int) -> None:
    """Write the request, replacing an earlier one. Raises OSError."""
    write_whole(run_dir / SCALE_FILE, json.dumps({_COUNT: num_replicas}) + "\n")


def take_request(run_dir: Path) -> int | None:
    """Return the pending request and delete it, or return None if there is none.

    Raises:
        ValueError: The file is not a valid request.
    """
    path = run_dir / SCALE_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None

    # Delete the file before parsing it, so that a damaged request is reported once and not at every step.
    path.unlink()
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({error}); `megarl scale` writes it") from error

    number = values.get(_COUNT) if isinstance(values, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MOST_REPLICAS:
        raise ValueError(
            f"{path}: {_COUNT} is {number!r}, but must be in [1, {MOST_REPLICAS}]; `megarl scale` writes it"
        )

    return number
