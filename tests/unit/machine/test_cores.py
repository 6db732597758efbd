from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.machine.cores import usable_cores


@pytest.mark.parametrize(("quota", "most"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), (None, None)])
def test_a_container_may_have_less_time_than_cores(tmp_path: Path, quota: str | None, most: int | None) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    assert usable_cores(file) == (most or len(os.sched_getaffinity(0)))
