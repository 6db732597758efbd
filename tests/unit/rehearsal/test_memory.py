"""The plan of memory is never below what a rehearsal measures, and near: of the quickstart, which is small,
each role in one mode.

In every mode, and of all runs of configs/, tests/soak/test_rehearsed_memory.py shows the same.
"""

from __future__ import annotations

import pytest

from tests.unit.rehearsal.memory_cases import FROZEN, cases_of, problems_of, rehearse_cases

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

MODES = {"actor": "full", "critic": "none", "reference": FROZEN}


def test_the_plan_is_near_and_never_below() -> None:
    cases = [case for case in cases_of("quickstart") if case.mode == MODES[case.role]]
    assert sorted(case.role for case in cases) == sorted(MODES)
    assert problems_of(rehearse_cases(cases, num_processes=1)) == []
