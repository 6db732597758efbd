"""Read `metrics.jsonl` as one curve per metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.machine.files import parse_json


class MetricsFileError(ValueError):
    """A run's metrics cannot be read. The message names the file and, if known, the line."""


class Points(NamedTuple):
    steps: list[int]
    values: list[float]


Series = Mapping[str, Points]  # metric -> its finite points, in increasing step order


def read_metrics(path: Path) -> dict[str, Points]:
    """Return the curve of every metric in a `metrics.jsonl`.

    If a step was logged twice (a resumed run), its later line counts. NaN and infinite values are left out. A
    last line without a line break is the unfinished line of a killed run, and is skipped.

    Raises:
        MetricsFileError: The file is missing, contains no step, or is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MetricsFileError(
            f"{path}: there is no such file; give a run's folder (trainer.output_dir) whose "
            f"tracking.loggers include 'jsonl'"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise MetricsFileError(f"{path}: cannot be read as text: {error}") from error

    lines = text.split("\n")
    by_step: dict[int, dict[str, float]] = {}

    # Whatever follows the last line break is an unfinished line, or empty.
    for number, line in enumerate(lines[:-1], start=1):
        record = parse_line(path, number, line)
        # Other values may be strings, which have no curve.
        by_step.setdefault(record.pop("step"), {}).update(
            {
                name: float(value)
                for name, value in record.items()
                if isinstance(value, int | float) and math.isfinite(value)
            }
        )

    if not by_step:
        raise MetricsFileError(f"{path}: contains no complete step yet; try again after the run's first step")

    # Convert the steps into one curve per metric.
    series: dict[str, Points] = {}
    for step, metrics in sorted(by_step.items()):
        for name, value in metrics.items():
            points = series.setdefault(name, Points([], []))
            points.steps.append(step)
            points.values.append(value)

    return series


def parse_line(path: Path, number: int, line: str | bytes) -> dict[str, Any]:
    """Return the record of a line of the logs, which has an integer `step`.

    Raises:
        MetricsFileError: The line is damaged.
    """
    try:
        record = parse_json(line)
    except ValueError as error:
        raise MetricsFileError(
            f"{path}, line {number}: not JSON ({error}); fix or delete that line"
        ) from error

    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise MetricsFileError(
            f"{path}, line {number}: expected an object with an integer 'step', found {str(record)[:60]!r}; "
            f"fix or delete that line"
        )
    return record
