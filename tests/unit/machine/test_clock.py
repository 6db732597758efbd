"""If the wall clock is adjusted during a measurement, only the start time is affected."""

from __future__ import annotations

import time

import pytest

from megarl.machine.clock import Began


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_elapsed_time_does_not_follow_the_wall_clock(jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    began = Began()
    of_day = time.time
    monkeypatch.setattr(time, "time", lambda: of_day() + jump_s)
    assert 0 <= began.seconds() < 60
    assert 0 <= began.now_s() - began.start_s < 60
    assert abs(Began().start_s - began.start_s - jump_s) < 60
