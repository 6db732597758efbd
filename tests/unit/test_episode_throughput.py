"""Many episodes at once whose tools take long, fail or hang, in virtual time, and programs that do, over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import endpoint
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


def test_programs_that_fail_or_disconnect_leave_nothing() -> None:
    """benchmarks.endpoint"""
    kinds = ["plain", "raises", "disconnects"] * 4
    played = asyncio.run(endpoint.through_endpoint(kinds, token_s=0.0002))
    assert endpoint.unexpected(played, kinds) == []
    # An episode that failed has no turns. A client may disconnect at the moment of its answer, and ask again.
    assert 8 * endpoint.TURNS <= played.num_turns <= 12 * endpoint.TURNS
    assert played.num_left == 0
