"""`megarl doctor [CONFIG]`: examines this machine, the cluster and what a run reads, and says of each whether it is good."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megarl import __version__
from megarl.doctor import devices, software
from megarl.doctor.check_result import CheckResult, Status, as_json, worst, wrong
from megarl.doctor.examined_run import ExaminedRun, read_subject
from megarl.machine.ray_address import cluster_address

GOOD, USER_ERROR = 0, 2
_WIDTH = 140  # where nobody's window limits it
_COLOURS = {Status.warning: "yellow", Status.error: "red"}


class Check(NamedTuple):
    """`module` is imported when its turn comes: what lacks a library is said, and the rest is examined. `of_run`: says nothing without a
    configuration."""

    title: str
    module: str
    function: str = "check"
    of_run: bool = False


# Quick ones first; those that need other processes last.
CHECKS = (
    Check("shared memory", "machine", "shared_memory"),
    Check("open files", "machine", "open_files"),
    Check("memory", "machine", "memory"),
    Check("threads", "machine", "threads"),
    Check("clock", "machine", "clock"),
    Check("environment", "machine", "environment"),
    Check("sandbox", "machine", "sandbox"),
    Check("ports", "network", "ports"),
    Check("layers", "software", "layers", of_run=True),
    Check("checkpoints", "storage", of_run=True),
    Check("models, tokenizers, data and rewards", "inputs", of_run=True),
    Check("ranks", "network", "loopback"),
    Check("ray", "ray_cluster"),
)


def run(config_path: str | None, overrides: Sequence[str], as_document: bool = False) -> int:
    """Prints what was found, as a table or as one JSON document; 0 where nothing is an error, 2 where something is."""
    begin = time.monotonic()
    is_limited = Console().is_terminal or "COLUMNS" in os.environ
    console = Console(stderr=as_document, width=None if is_limited else _WIDTH)
    results = examine(config_path, overrides, console)
    seconds = time.monotonic() - begin
    if as_document:
        print(json.dumps(document(config_path, results, seconds), indent=2))
    else:
        console.print(table(results))
        console.print(summary(results, seconds), highlight=False)
    return USER_ERROR if worst(results) is Status.error else GOOD


def examine(config_path: str | None, overrides: Sequence[str], console: Console) -> list[CheckResult]:
    """Every check, one after the other."""
    gpus = devices.probe()
    subject, results = read_subject(config_path, overrides, len(gpus.gpus), cluster_address())
    results += [*software.check(subject), *devices.check(subject, gpus)]
    for check in (each for each in CHECKS if subject.config is not None or not each.of_run):
        with console.status(f"examining {check.title}"):
            results += _find(check, subject)
    return results


def _find(check: Check, subject: ExaminedRun) -> list[CheckResult]:
    try:
        module = importlib.import_module(f"megarl.doctor.{check.module}")
    except ImportError as error:
        return [wrong(check.title, f"cannot be examined: {error}", "install what is said under versions, then ask again")]
    return list(getattr(module, check.function)(subject))


def table(results: Sequence[CheckResult]) -> Table:
    drawn = Table(box=None, show_header=False, pad_edge=False)
    drawn.add_column(width=max(len(status.value) for status in Status))
    drawn.add_column(no_wrap=True)
    drawn.add_column(overflow="fold")
    for finding in results:
        drawn.add_row(
            finding.status.value, finding.check, finding.message, style=None if finding.status is Status.ok else _COLOURS[finding.status]
        )
        if finding.remedy is not None:
            drawn.add_row("", "", f"-> {finding.remedy}")
    return drawn


def summary(results: Sequence[CheckResult], seconds: float) -> str:
    counts = _counts(results)
    said = {Status.ok: "good", Status.warning: "good, with warnings", Status.error: "not good"}[worst(results)]
    return f"{said}: {counts['ok']} ok, {counts['warning']} warnings, {counts['error']} errors, in {seconds:.0f} s"


def document(config_path: str | None, results: Sequence[CheckResult], seconds: float) -> dict[str, object]:
    return {
        "megarl": __version__,
        "config": config_path,
        "status": worst(results).value,
        "counts": _counts(results),
        "seconds": round(seconds, 1),
        "findings": [as_json(finding) for finding in results],
    }


def _counts(results: Sequence[CheckResult]) -> dict[str, int]:
    return {status.value: sum(finding.status is status for finding in results) for status in Status}
