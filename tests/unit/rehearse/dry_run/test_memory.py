"""The memory plan is never below what a dry run measures, and close: for the small quickstart, one mode per role.

tests/soak/test_rehearsed_memory.py covers every mode of all runs in configs/.
"""

from __future__ import annotations

import pytest

from tests.memory_tables import read_tables
from tests.unit.rehearse.dry_run.memory_cases import CONFIGS, FROZEN, cases_of, problems_of, rehearse_cases

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

MODES = {"actor": "full", "critic": "none", "reference": FROZEN}


def test_the_plan_is_near_and_never_below() -> None:
    cases = [case for case in cases_of("quickstart") if case.mode == MODES[case.role]]
    assert sorted(case.role for case in cases) == sorted(MODES)
    assert problems_of(rehearse_cases(cases, num_processes=1)) == []


def test_every_run_has_a_table_of_measurements() -> None:
    assert list(read_tables()) == sorted(file.stem for file in CONFIGS.glob("*.yaml"))
