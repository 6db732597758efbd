"""What a run writes into its folder, `trainer.output_dir`: the names, and what is raised where that cannot
be.

The names of what has a format of its own stand beside that format.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.machine.errors import UNWRITTEN, RunError

METRICS_FILE = "metrics.jsonl"
GENERATIONS_FILE = "generations.jsonl"
CONFIG_FILE = "config.yaml"  # resolved
SUMMARY_FILE = "summary.json"  # of a run that has ended well
FAILURE_FILE = "failure.txt"  # of one that has not
STATUS_FILE = "status.json"  # where it is right now
REPORT_FILE = "report.html"


def check_run_folder(output_dir: Path) -> None:
    """Raises RunError where a run's folder is no longer there: what is written would go nowhere."""
    if not output_dir.is_dir():
        raise RunError(
            f"{output_dir}: the run's folder was removed, or taken by something else, while it was running; "
            f"what it had logged and "
            "saved there is gone with it. Start the run again, or restore the folder first to resume from "
            "its latest checkpoint"
        )


@contextmanager
def writing(output_dir: Path) -> Iterator[None]:
    """Around what writes files of a run's folder: an OSError is a RunError that names the file, or says that
    the folder is not there."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RunError):  # a rank that hangs is a TimeoutError as well
            raise
        check_run_folder(output_dir)
        raise RunError(
            f"{error.filename or output_dir}: cannot be written: {error.strerror or error}", hint=UNWRITTEN
        ) from error
