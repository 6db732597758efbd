"""Many episodes at once whose tools take long, fail or hang, in virtual time."""

from __future__ import annotations

import pytest

from benchmarks.episodes import EPISODES, SLOTS, play
from megarl.agents.protocol import CallErrorKind


def test_slots_are_full_and_every_environment_is_closed_once() -> None:
    """benchmarks.episodes"""
    played = play(turns=8)
    assert played == play(turns=8)
    assert len(played.calls_s) == 7 * EPISODES
    assert 0.9 < played.share_of_most <= 1
    assert played.seconds == pytest.approx(sum(played.calls_s) / SLOTS, rel=0.1)
    assert (played.num_opened, played.num_closed, played.num_left) == (EPISODES, EPISODES, 0)
    assert set(played.errors) == {CallErrorKind.raised, CallErrorKind.timed_out}
