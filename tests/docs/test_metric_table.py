"""Test the metric table: it covers everything that runs log, and has no unused rows.

tests/integration checks real runs against the table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.generate.metric_table import METRICS
from docs.generate.metrics import metric_tables
from tests.metric_names import unknown_metrics

ROOT = Path(__file__).parents[2]
ROWS = [row for rows in METRICS.values() for row in rows]
UNITS = {
    "",
    "share",
    "nats",
    "tokens",
    "tokens/s",
    "TFLOP/s",
    "GB/s",
    "GiB",
    "bytes",
    "s",
    "turns",
    "rows",
    "calls",
    "prompts",
    "versions",
}


def names_in(value: Any) -> Iterator[str]:
    """Return the metrics in a golden record."""
    if isinstance(value, dict):
        yield from (key for key, inner in value.items() if "/" in key and isinstance(inner, int | float))
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from names_in(inner)


def test_a_row_is_complete_and_stands_once() -> None:
    assert len({row.pattern for row in ROWS}) == len(ROWS)
    assert {row.unit for row in ROWS} <= UNITS
    for row in ROWS:
        assert row.meaning.endswith(".")
        assert "|" not in row.meaning
        assert f"| `{row.pattern}` | {row.unit} | {row.meaning} |" in metric_tables()


def test_what_a_golden_run_logs_is_in_the_table() -> None:
    records = list((ROOT / "tests" / "integration" / "golden").glob("*.json"))
    assert records

    for record in records:  # one record per CPU type whose runs are compared bitwise
        names = set(names_in(json.loads(record.read_text())))
        assert len(names) > 60
        assert unknown_metrics(names) == []


@pytest.mark.parametrize(
    "name",
    [
        "actor/pg_los",
        "reward/mean/",
        "val/score",
        "timing_s/",
        "critic/score/median",
        "actor/ratio_max,ratio_min",
        "perf/mfu",
    ],
)
def test_other_names_are_unknown(name: str) -> None:
    assert unknown_metrics(
        [name, "step", "val/score/mean", "val/gsm8k/score/mean", "reward/format/max", "val/best@8"]
    ) == [name]


def test_every_row_is_of_something_that_the_code_logs() -> None:
    """Each word of a pattern occurs in the code that computes metrics."""
    sources = "\n".join(path.read_text() for path in (ROOT / "megarl").rglob("*.py"))
    missing = {
        word
        for row in ROWS
        for word in re.findall(r"\w+", re.sub(r"<\w+>", "", row.pattern))
        if not re.search(rf"(?<![A-Za-z]){word}(?![A-Za-z])", sources)
    }
    assert missing == set()
