"""`megarl doctor [CONFIG]`: checks this machine, the cluster and the inputs of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from rich.table import Table

from megarl.cli.tables.console import output_console, print_line
from megarl.config.finding import Finding, Status, worst
from megarl.doctor.checks import counts, document, examine
from megarl.machine.errors import counted

USER_ERROR = 2
_COLOURS = {Status.warning: "yellow", Status.error: "red"}


def run(config_path: str | None, overrides: Sequence[str], as_document: bool = False) -> int:
    """Print the results as a table or as one JSON document. Return 0, or 2 if one of them is an error."""
    begin = time.monotonic()
    console = output_console(stderr=as_document)
    results = examine(config_path, overrides, console)
    seconds = time.monotonic() - begin

    if as_document:
        print(json.dumps(document(config_path, results, seconds), indent=2))
    else:
        console.print(table(results))
        print_line(console, summary(results, seconds))

    return USER_ERROR if worst(results) is Status.error else 0


def table(results: Sequence[Finding]) -> Table:
    drawn = Table(box=None, show_header=False, pad_edge=False)
    drawn.add_column(width=max(len(status.value) for status in Status))
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")

    for finding in results:
        drawn.add_row(
            finding.status.value,
            finding.check,
            finding.message,
            style=None if finding.status is Status.ok else _COLOURS[finding.status],
        )
        if finding.hint is not None:
            drawn.add_row("", "", f"-> {finding.hint}")

    return drawn


def summary(results: Sequence[Finding], seconds: float) -> str:
    counted_by = counts(results)
    said = {Status.ok: "passed", Status.warning: "passed, with warnings", Status.error: "failed"}[
        worst(results)
    ]
    found = (
        f"{counted_by['ok']} ok",
        counted(counted_by["warning"], "warning"),
        counted(counted_by["error"], "error"),
    )

    return f"{said}: {', '.join(found)}, in {seconds:.0f} s"
