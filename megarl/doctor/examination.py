"""Everything that `megarl doctor` examines: this machine, the cluster, and what a run reads."""

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
    """`module` is imported when its turn comes: what lacks a library is said, and the rest is examined.
    `of_run`: says nothing without a configuration."""

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


def examine(config_path: str | None, overrides: Sequence[str], console: Console) -> list[CheckResult]:
    """Every check, one after the other."""
    gpus = devices.probe()
    subject, results = read_subject(config_path, overrides, len(gpus.gpus), cluster_address())
    results += [*software.check(subject), *devices.check(subject, gpus)]

    # Modules are imported one by one, so that a missing package fails only the check that needs it.
    for check in (each for each in CHECKS if subject.config is not None or not each.of_run):
        with console.status(f"examining {check.title}"):
            results += _find(check, subject)

    return results


def _find(check: Check, subject: ExaminedRun) -> list[CheckResult]:
    try:
        module = importlib.import_module(f"megarl.doctor.{check.module}")
    except ImportError as error:
        return [
            wrong(
                check.title,
                f"cannot be examined: {error}",
                "install what is said under versions, then ask again",
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
