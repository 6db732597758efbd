"""Compare the memory plan with dry runs of every run in configs/: each role, stage and recompute mode.

docs/evidence.md shows the numbers.

MEGARL_WRITE_PAGES=1 python -m pytest tests/soak/test_rehearsed_memory.py              # rewrites the tables
MEGARL_WRITE_PAGES=1 python -m pytest tests/soak/test_rehearsed_memory.py -k qwen3_32b_grpo   # rewrites one
"""

from __future__ import annotations

import os

import pytest

from tests.failure_pages import WRITE
from tests.memory_tables import DOCUMENT, PHASES, Rows, read_tables, write_table
from tests.unit.rehearse.dry_run.memory_cases import (
    CONFIGS,
    FROZEN,
    Compared,
    cases_of,
    problems_of,
    rehearse_cases,
)

RUNS = sorted(file.stem for file in CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("run", RUNS)
def test_the_plan_is_near_and_never_below(run: str) -> None:
    compared = rehearse_cases(cases_of(run))
    assert problems_of(compared) == []
    table = _rows(run, compared)
    if os.environ.get(WRITE):
        write_table(run, table)
    else:
        assert read_tables().get(run) == table, (
            f"{DOCUMENT} has other numbers; if these are right, write them with {WRITE}=1:\n{table}"
        )


def _rows(run: str, compared: list[Compared]) -> Rows:
    unit, size = ("MiB", 2**20) if run.startswith("quickstart") else ("GiB", 2**30)
    rows = []

    for case, record, plan in compared:
        phases = {phase.name: phase for phase in record.phases}
        state = _cell(phases["build"].held, plan.held, size)
        peaks = [
            _cell(phases[name].peak, plan.peaks[name], size) if name in phases and name in plan.peaks else ""
            for name in PHASES[1:]
        ]
        mode = "" if case.mode == FROZEN else case.mode
        rows.append([case.role, str(record.pipeline_rank), mode, unit, state, *peaks])

    return rows


def _cell(measured: int, planned: int, size: int) -> str:
    return f"{measured / size:,.2f} / {planned / size:,.2f}"
