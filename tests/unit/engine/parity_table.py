"""The table of docs/verification.md with the measured differences between the engine and Hugging Face.

MEGARL_WRITE_PAGES=1 python -m pytest tests/unit/engine/test_parity.py  # rewrites the measured rows
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.failure_pages import WRITE

DOCUMENT = Path(__file__).parents[3] / "docs" / "verification.md"
_TABLE = re.compile(
    r"(?<=<!-- table: written by tests/unit/engine/test_parity.py -->\n).*?(?=<!-- end of table -->)",
    re.DOTALL,
)
_ROW = re.compile(r"(?m)^\| `(?P<model>[^`]+)` \| (?P<layout>[^|]+) \| (?P<numbers>[^|]+\|[^|]+\|[^|]+) \|$")

Comparison = tuple[str, str]  # model and layout


class Differences(NamedTuple):
    """The largest differences of one comparison.

    Attributes:
        outputs: Of log-probs, entropy, values and logits, absolute.
        gradients: Of a tensor's gradient, relative to its norm.
        grad_norm: Of the norm of all gradients, relative.
    """

    outputs: float
    gradients: float
    grad_norm: float


def documented() -> dict[Comparison, Differences]:
    """Return the rows of the page."""
    (table,) = _TABLE.findall(DOCUMENT.read_text(encoding="utf-8"))
    return {
        (row["model"], row["layout"].strip()): Differences(*map(float, row["numbers"].split("|")))
        for row in _ROW.finditer(table)
    }


def record(comparison: Comparison, measured: Differences, every_comparison: Iterable[Comparison]) -> None:
    """Write a row to the page if the environment asks for it, and drop rows without a case."""
    if not os.environ.get(WRITE):
        return

    rows = documented() | {comparison: measured}
    lines = [
        "",
        "| model | layout | outputs | gradients | gradient norm |",
        "|---|---|---|---|---|",
        *(_line(each, rows[each]) for each in every_comparison if each in rows),
        "",
    ]
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(_TABLE.sub(lambda _: "\n".join(lines) + "\n", text), encoding="utf-8")


def _line(comparison: Comparison, differences: Differences) -> str:
    model, layout = comparison
    return f"| `{model}` | {layout} | {' | '.join(f'{value:.1e}' for value in differences)} |"
