"""The table docs/static/parity.csv with the measured differences between the engine and Hugging Face.

MEGARL_WRITE_PAGES=1 python -m pytest tests/unit/engine/test_parity.py  # rewrites the measured rows
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.failure_pages import WRITE

DOCUMENT = Path(__file__).parents[3] / "docs" / "static" / "parity.csv"
_HEAD = ["model", "layout", "outputs", "gradients", "gradient norm"]

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
    """Return the rows of the table."""
    with DOCUMENT.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    assert head == _HEAD, f"{DOCUMENT} has other columns"
    return {(model, layout): Differences(*map(float, numbers)) for model, layout, *numbers in rows}


def record(comparison: Comparison, measured: Differences, every_comparison: Iterable[Comparison]) -> None:
    """Write a row to the table if the environment asks for it, and drop rows without a case."""
    if not os.environ.get(WRITE):
        return

    rows = documented() | {comparison: measured}
    with DOCUMENT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_HEAD)
        writer.writerows(
            [*each, *(f"{value:.1e}" for value in rows[each])] for each in every_comparison if each in rows
        )
