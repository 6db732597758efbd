"""Compare the memory plan with dry runs of every run in configs/: each role, stage and recompute mode.

docs/verification.md shows the numbers.

MEGARL_WRITE_PAGES=1 python -m pytest tests/soak/test_rehearsed_memory.py    # rewrites the tables
"""

from __future__ import annotations

import os
import re
from itertools import groupby
from pathlib import Path

from megarl.rehearsal.prediction import UNEVEN
from tests.failure_pages import WRITE
from tests.unit.rehearsal.memory_cases import CONFIGS, Compared, cases_of, problems_of, rehearse_cases

DOCUMENT = Path(__file__).parents[2] / "docs" / "verification.md"
_TABLES = re.compile(
    r"(?<=<!-- tables: written by tests/soak/test_rehearsed_memory.py -->\n).*(?=<!-- end of tables -->)",
    re.DOTALL,
)
_PHASES = ("score", "train", "step")
_UNEVEN = tuple(f"{name}{UNEVEN}" for name in ("score", "train"))  # of models with experts


def test_the_plan_is_near_and_never_below() -> None:
    runs = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    assert len(runs) >= 10
    compared = rehearse_cases(case for run in runs for case in cases_of(run))
    assert problems_of(compared) == []
    text = DOCUMENT.read_text(encoding="utf-8")
    tables = "\n".join(
        _table(run, list(group)) for run, group in groupby(compared, key=lambda each: each.case.run)
    )
    made, num_places = _TABLES.subn(lambda _: f"\n{tables}\n", text)
    assert num_places == 1, f"{DOCUMENT} has {num_places} places for the tables"
    if os.environ.get(WRITE):
        DOCUMENT.write_text(made, encoding="utf-8")
    assert made == text or os.environ.get(WRITE), (
        f"{DOCUMENT} has other numbers; if these are right, write them with {WRITE}=1:\n{made}"
    )


def _table(run: str, compared: list[Compared]) -> str:
    unit, size = ("MiB", 2**20) if run.startswith("quickstart") else ("GiB", 2**30)
    names = [name for name in (*_PHASES, *_UNEVEN) if name in compared[0].plan.peaks]
    lines = [
        f"### {run}",
        "",
        f"| role | stage | recompute | state, {unit} | {' | '.join(f'{name}, {unit}' for name in names)} |",
        f"|---|---|---|{'---|' * (1 + len(names))}",
    ]

    for case, record, plan in compared:
        phases = {phase.name: phase for phase in record.phases}
        cells = [_cell(phases["build"].held, plan.held, size)]
        cells += [
            _cell(phases[name].peak, plan.peaks[name], size) if name in phases else "" for name in names
        ]
        lines.append(f"| {case.role} | {record.pipeline_rank} | {case.mode} | {' | '.join(cells)} |")

    return "\n".join([*lines, ""])


def _cell(measured: int, planned: int, size: int) -> str:
    return f"{measured / size:,.2f} / {planned / size:,.2f}"
