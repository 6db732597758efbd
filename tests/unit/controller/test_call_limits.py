"""Limits are learned only for some methods, from enough calls, and within the floor and the fixed limit."""

from __future__ import annotations

import pytest

from megarl.controller.call_limits import GroupLimits, LearnedLimits


def limits(factor: float = 4.0) -> GroupLimits:
    return GroupLimits(1800.0, LearnedLimits(("update",), factor, floor_s=10.0))


@pytest.mark.parametrize(
    ("seconds", "limit_s"),
    [
        ([5.0, 5.0, 5.0], 1800.0),  # too few
        ([50.0, 5.0, 5.0, 5.0, 5.0], 20.0),  # the slow first call does not matter
        ([0.1] * 5, 10.0),
        ([1000.0] * 5, 1800.0),
    ],
)
def test_the_limit_is_a_multiple_of_the_median(seconds: list[float], limit_s: float) -> None:
    own = limits()
    for value in seconds:
        own.learn("update", value)
        own.learn("begin_save", value)
    assert own.limit_s("update") == limit_s
    assert own.limit_s("begin_save") == own.limit_s(None) == 1800.0


def test_nothing_is_learned_without_a_factor() -> None:
    own = limits(factor=0.0)
    for _ in range(8):
        own.learn("update", 5.0)
    assert own.limit_s("update") == 1800.0
