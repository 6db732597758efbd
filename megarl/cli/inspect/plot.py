"""`megarl plot RUN_DIR`: draws a run's curves."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.tracking.metrics_file import MetricsFileError
from megarl.tracking.plot import plot_run


def run(run_dir: str) -> int:
    """Write RUN_DIR/curves.png, and return the exit code: 0, or 2 with one line for a user error."""
    try:
        written = plot_run(Path(run_dir))
    except MetricsFileError as error:
        print(f"megarl plot: {error}", file=sys.stderr)
        return 2

    print(f"curves drawn to {written}")
    return 0
