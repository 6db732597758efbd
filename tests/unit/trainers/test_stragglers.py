"""Test when a rank counts as slow, with times that were measured on a busy machine."""

from __future__ import annotations

from statistics import median

import pytest

from megarl.trainers.step_observers import NUM_UPDATES, SpeedHistory

FACTOR = 1.5
# Times of the probe in 40 updates of four ranks on two cores with a load of 13, in units of 10 us. One rank took
# more than 1.5 times as long as its peers in three updates in a row.
RECORDED = (
    (
        65,
        67,
        70,
        381,
        76,
        65,
        62,
        64,
        68,
        68,
        66,
        73,
        62,
        63,
        65,
        66,
        68,
        946,
        62,
        73,
        64,
        62,
        62,
        65,
        61,
        67,
        65,
        338,
        287,
        1716,
        58,
        400,
        217,
        70,
        68,
        63,
        62,
        62,
        60,
        63,
    ),
    (
        74,
        63,
        64,
        64,
        65,
        74,
        72,
        64,
        81,
        59,
        66,
        62,
        65,
        62,
        62,
        70,
        64,
        338,
        2814,
        307,
        70,
        62,
        69,
        369,
        62,
        66,
        62,
        62,
        66,
        63,
        64,
        62,
        69,
        62,
        62,
        69,
        62,
        68,
        65,
        65,
    ),
    (
        658,
        66,
        66,
        65,
        68,
        63,
        63,
        65,
        69,
        60,
        62,
        60,
        300,
        63,
        59,
        67,
        69,
        1011,
        1190,
        309,
        956,
        70,
        67,
        778,
        65,
        73,
        64,
        62,
        65,
        62,
        64,
        60,
        63,
        63,
        243,
        62,
        321,
        65,
        158,
        61,
    ),
    (
        64,
        63,
        65,
        77,
        73,
        64,
        64,
        64,
        59,
        60,
        62,
        59,
        60,
        62,
        63,
        71,
        64,
        1016,
        63,
        166,
        66,
        62,
        110,
        66,
        62,
        65,
        1198,
        63,
        209,
        72,
        70,
        65,
        63,
        63,
        64,
        64,
        68,
        63,
        60,
        60,
    ),
)
UPDATES = [dict(enumerate(times)) for times in zip(*RECORDED, strict=True)]


def see(history: SpeedHistory, updates: list[dict[int, float]]) -> list[tuple[int, tuple[int, float]]]:
    """Return the ranks that are reported, with the number of the update."""
    return [(number, slow) for number, update in enumerate(updates, 1) for slow in history.see(update)]


def slowed(updates: list[dict[int, float]], rank: int, factor: float) -> list[dict[int, float]]:
    return [{**update, rank: update[rank] * factor} for update in updates]


def test_noise_is_not_reported() -> None:
    history = SpeedHistory(FACTOR)
    assert see(history, UPDATES * 3) == []


@pytest.mark.parametrize("rank", range(4))
def test_a_slow_rank_is_reported_once(rank: int) -> None:
    history = SpeedHistory(FACTOR)
    ((number, (slow_rank, ratio)),) = see(history, slowed(UPDATES * 3, rank, 3.0))
    assert slow_rank == rank
    assert NUM_UPDATES <= number < 60
    assert ratio == pytest.approx(3.0, rel=0.2)


def test_a_rank_that_was_fast_in_between_is_reported_again() -> None:
    """Two ranks with constant times: the ratio is that of the two."""
    even = [{0: 1.0, 1: 1.0}]
    slow = [{0: 1.0, 1: 1.6}]
    history = SpeedHistory(FACTOR)
    found = (1, pytest.approx(1.6))
    assert see(history, slow * (NUM_UPDATES - 1) + even) == []
    assert see(history, slow * 3 * NUM_UPDATES) == [(NUM_UPDATES, found)]
    assert history.largest_ratio(4) == pytest.approx(1.6)
    assert see(history, even * (NUM_UPDATES - 1) + slow * 2 * NUM_UPDATES) == []  # the same episode
    assert see(history, even * NUM_UPDATES + slow * NUM_UPDATES) == [(2 * NUM_UPDATES, found)]


def test_the_largest_ratio_is_that_of_the_slowest_rank() -> None:
    """The median of its ratios over the last updates, by hand."""
    history = SpeedHistory(FACTOR)
    see(history, [{0: 1.0, 1: 9.0, 2: 1.0}, {0: 1.0, 1: 2.0, 2: 3.0}, {0: 2.0, 1: 4.0, 2: 2.0}])
    assert history.largest_ratio(2) == pytest.approx(median([1.0, 2.0]))
    assert history.largest_ratio(3) == pytest.approx(median([9.0, 1.0, 2.0]))
