"""Random kills of the fake engine's processes: the soak command of tests/soak/kills.py, for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.kills import run

KILLS = 14


@pytest.mark.slow
def test_random_kills_lose_nothing(ray_cluster: None, tmp_path: Path) -> None:
    report = run("fake", num_kills=KILLS, seed=0, folder=tmp_path)
    assert sum(report.victims.values()) == KILLS
    assert len(report.victims) >= 2  # workers, and processes that their engines had started
    assert report.num_restarts >= KILLS // 2  # a process may die of one kill while the next is under way
    assert report.num_resent > 0
    assert report.num_checksums > 0
