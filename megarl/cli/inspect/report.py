"""`megarl report RUN_DIR [RUN_DIR ...]`: an HTML report of runs, written to a file or served live."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.cli.tables.placement import parts_table
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.config.validate import read_architectures, validate
from megarl.machine.errors import ConfigError
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.tracking.report.live import LiveReport
from megarl.tracking.report.page import write_page
from megarl.tracking.report.run_folder import RunFolder, RunFolderError, open_runs
from megarl.tracking.run_files import REPORT_FILE


def run(run_dirs: Sequence[str], output: str | None, is_live: bool, port: int) -> int:
    """Write one self-contained HTML file, or serve the report on this machine until Ctrl-C.

    Args:
        output: The file; None: `report.html` in the first folder.
        is_live: Serve the report instead of writing it.
        port: The port of the server; 0: any free port.

    Returns:
        The exit code: 0, or 2 with one line for a user error.
    """
    try:
        runs = list(open_runs([Path(each) for each in run_dirs], planned_memory))
        if is_live:
            _serve(runs, port)
        else:
            _write(runs, Path(run_dirs[0]) / REPORT_FILE if output is None else Path(output))
    except RunFolderError as error:
        print(f"megarl report: {error}", file=sys.stderr)
        return 2
    return 0


def planned_memory(config_path: Path) -> dict[str, list[Any]] | None:
    """Return the memory of each role on the fullest device of each pool, as `megarl check` shows it.

    Returns:
        The table's `columns` and `rows`; None if the configuration is from another version or its models are
        not on this machine.
    """
    try:
        config = load_config(RunConfig, config_path)
        architectures, absent = read_architectures(config)
        if absent or validate(config):
            return None
        table = parts_table(plan_memory(config, plan_placement(config), architectures))
    # The report is still useful without the plan.
    except ConfigError:
        return None

    rows = zip(*(column.cells for column in table.columns), strict=True)
    return {
        "columns": [str(column.header) for column in table.columns],
        "rows": [list(map(str, row)) for row in rows],
    }


def _write(runs: Sequence[RunFolder], path: Path) -> None:
    try:
        nbytes = write_page(runs, path)
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be written ({error.strerror or error}); give another file with --output FILE"
        ) from error
    print(f"report written to {path} ({nbytes / 2**20:.1f} MiB); open it in a browser")


def _serve(runs: Sequence[RunFolder], port: int) -> None:
    try:
        report = LiveReport(runs, port)
    except (OSError, OverflowError) as error:
        raise RunFolderError(
            f"--port {port}: cannot listen ({error}); give another port, or 0 for any free port"
        ) from error

    print(
        f"following {', '.join(run.name for run in runs)} at {report.url} (this machine only; Ctrl-C stops "
        f"it)",
        flush=True,
    )
    try:
        report.serve()
    except KeyboardInterrupt:
        print("stopped")
