"""The checks of `megarl doctor`: this machine, the cluster, and the inputs of a run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console

from megarl import __version__
from megarl.doctor import devices, software
from megarl.doctor.check_result import CheckResult, Status, as_json, worst, wrong
from megarl.doctor.examined_run import ExaminedRun, read_subject
from megarl.machine.ray_address import cluster_address


class Check(NamedTuple):
    """A check, whose module is imported when it runs, so that a missing library fails only this check.

    Attributes:
        of_run: Whether it requires a configuration.
    """

    title: str
    module: str
    function: str = "check"
    of_run: bool = False


# Fast checks come first, and checks that start processes last.
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


def examine(config_path: str | None, overrides: Sequence[str], console: Console) -> list[CheckResult]:
    """Run all checks in sequence."""
    gpus = devices.probe()
    subject, results = read_subject(config_path, overrides, len(gpus.gpus), cluster_address())
    results += [*software.check(subject), *devices.check(subject, gpus)]

    # Import modules one by one, so that a missing package fails only the check that needs it.
    for check in (each for each in CHECKS if subject.config is not None or not each.of_run):
        with console.status(f"checking {check.title}"):
            results += _find(check, subject)

    return results


def _find(check: Check, subject: ExaminedRun) -> list[CheckResult]:
    try:
        module = importlib.import_module(f"megarl.doctor.{check.module}")
    except ImportError as error:
        return [
            wrong(
                check.title,
                f"cannot be checked: {error}",
                "install the packages that the check of versions reports, then run this command again",
            )
        ]
    return list(getattr(module, check.function)(subject))


def document(config_path: str | None, results: Sequence[CheckResult], seconds: float) -> dict[str, object]:
    return {
        "megarl": __version__,
        "config": config_path,
        "status": worst(results).value,
        "counts": counts(results),
        "seconds": round(seconds, 1),
        "findings": [as_json(finding) for finding in results],
    }


def counts(results: Sequence[CheckResult]) -> dict[str, int]:
    return {status.value: sum(finding.status is status for finding in results) for status in Status}
