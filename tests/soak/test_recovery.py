"""Test runs that lose ranks and nodes at random moments, in several layouts, synchronous and asynchronous."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multinode.nodes import missing
from tests.soak import recovery


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("cell", recovery.CELLS)
def test_faults_change_nothing(cell: str, forked_processes: None, tmp_path: Path) -> None:
    rows = [recovery.make_row(cell, number, seed=0, folder=tmp_path) for number in range(recovery.RUNS)]
    assert [row.problem for row in rows] == [""] * recovery.RUNS
