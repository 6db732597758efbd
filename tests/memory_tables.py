"""The table docs/static/memory_plan.csv, which compares the memory plan with dry runs of each run in configs/."""

from __future__ import annotations

import csv
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "static" / "memory_plan.csv"
PHASES = (
    "state",
    "score",
    "train",
    "step",
    "score, shared prompt",
    "train, shared prompt",
    "score, uneven",
    "train, uneven",
)
_HEAD = ["run", "role", "stage", "recompute", "unit", *PHASES]

Rows = list[list[str]]  # the cells of a run, without its name


def read_tables() -> dict[str, Rows]:
    """Return the rows of each run by the run's name."""
    with DOCUMENT.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == _HEAD, f"{DOCUMENT} has other columns"

    tables: dict[str, Rows] = {}
    for run, *cells in rows:
        tables.setdefault(run, []).append(cells)
    return tables


def write_table(run: str, rows: Rows) -> None:
    """Replace or add the rows of a run. The runs are in the order of their names."""
    tables = read_tables() | {run: rows}
    with DOCUMENT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEAD)
        writer.writerows([name, *cells] for name in sorted(tables) for cells in tables[name])
