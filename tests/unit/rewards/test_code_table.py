"""The table of programs (code_cases.py): each gets the expected score, in the strongest sandbox of this
machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.rewards import code
from megarl.rewards.code import compute_score
from tests.unit.rewards.code_cases import CASES


@pytest.fixture(autouse=True)
def little_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit CPU time so that loops end after a second, while later tests have enough time on a busy
    machine."""
    monkeypatch.setattr(code, "LIMITS", replace(code.LIMITS, cpu_s=1))
    monkeypatch.setattr(code, "sample_limit_s", lambda: 1000.0)


def test_the_table_is_large_and_has_no_case_twice() -> None:
    names = [name for name, *_ in CASES]
    assert len(names) >= 100
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("response", "tests", "score"), [pytest.param(*case, id=name) for name, *case in CASES]
)
def test_a_program_gets_the_share_of_the_tests_that_it_passes(
    response: str, tests: Any, score: float
) -> None:
    scored = compute_score("", response, tests, {})
    assert scored["score"] == pytest.approx(score)
    assert scored["all_passed"] == float(score == 1)
