"""Two thousand damaged configurations, of which tests/unit/config/test_mutations.py has the first two hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.mutations import ROOT, mishaps


def test_each_gets_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert mishaps(range(200, 2000), tmp_path) == []
