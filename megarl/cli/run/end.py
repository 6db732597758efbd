"""Describes how a run ended, what is saved, and how to continue. This module does not import torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megarl.checkpoints.run_folder import CheckpointFolder
from megarl.machine.errors import CheckpointError
from megarl.machine.files import parse_yaml, read_json_object
from megarl.tracking.run_files import CONFIG_FILE, FAILURE_FILE, SUMMARY_FILE

_CAUSE = re.compile(r"^what +(\S.*)$", re.MULTILINE)  # the cause in the failure report


def how_to_resume(checkpoints: Path) -> str:
    """Describe the newest checkpoint in this folder and how to continue from it."""
    try:
        latest = CheckpointFolder(checkpoints).latest()
    except CheckpointError as error:
        return f"its checkpoints are damaged: {error}"

    if latest is None:
        return f"no checkpoint is saved in {checkpoints}; the same command starts from the beginning"
    return f"the newest checkpoint is {latest}; the same command resumes from it"


def how_to_resume_in(run_dir: Path) -> str:
    """Describe the newest checkpoint of the run in this folder and how to continue from it.

    The checkpoints are in `checkpoints` in its folder, or in the folder that its configuration gives.
    """
    path = run_dir / CONFIG_FILE
    damage = f"{path} is damaged, so the folder of its checkpoints is unknown"
    try:
        values = parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        return f"{damage}: {error}"

    section = values.get("checkpoint", {}) if isinstance(values, dict) else None
    given = section.get("dir") if isinstance(section, dict) else section
    if not isinstance(section, dict) or not isinstance(given, str | None):
        return damage
    return how_to_resume(run_dir / "checkpoints" if given is None else Path(given))


def result_of(run_dir: Path) -> str:
    """Describe the result of a complete run in a few words; empty if it is unknown."""
    path = run_dir / SUMMARY_FILE
    if not path.is_file():
        return ""
    try:
        summary = read_json_object(path)
    except ValueError as error:
        return f"{path} is damaged: it {error}"

    validation: Any = summary.get("validation", {})
    if not isinstance(validation, dict) or not all(
        isinstance(score, int | float | None) for score in validation.values()
    ):
        return f"{path} is damaged: validation is {str(validation)[:60]!r}, but must be a mapping of numbers"

    parts = [f"stopped early: {summary['stopped_early']}"] if "stopped_early" in summary else []
    scores = {when: score for when, score in validation.items() if score is not None}
    if scores:
        parts.append("validation " + ", ".join(f"{score:.4g} {when}" for when, score in scores.items()))

    return "; ".join(parts)


def cause_of(run_dir: Path) -> str:
    """Return the cause in the failure report of a run; empty if there is no report."""
    path = run_dir / FAILURE_FILE
    found = _CAUSE.search(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    return found[1] if found else ""
