"""Test runs that lose ranks at random moments, in several layouts, synchronous and with generation ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import recovery


@pytest.mark.parametrize("kind", recovery.KINDS)
def test_sixty_faults_change_nothing(kind: str, ray_cluster: None, tmp_path: Path) -> None:
    report = recovery.soak(kind, num_faults=12, seed=0, inputs=tmp_path)
    assert report.difference == []
    assert report.num_faults >= 10
    assert report.num_recoveries >= 6  # a rank that dies after the last call of a step may be met in the next
