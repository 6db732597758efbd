"""Names of the files in a run's folder, `trainer.output_dir`, and errors for writing them.

Files with their own format are named in the module that defines the format.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from megarl.machine.errors import UNWRITTEN, RunError

METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"  # resolved
SUMMARY_FILE = "summary.json"  # only of a run that succeeded
FAILURE_FILE = "failure.txt"  # only of a run that failed
STACKS_FOLDER = "stacks"  # what each rank was doing when a call hung
STATUS_FILE = "status.json"  # current state of the run
REPORT_FILE = "report.html"


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
