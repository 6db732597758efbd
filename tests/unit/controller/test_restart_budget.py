"""Test the number of restarts within a window of time."""

import pytest

from megarl.controller.restart_budget import RestartBudget


def test_restarts_count_within_the_window_only() -> None:
    now_s = 0.0
    budget = RestartBudget(2, 100.0, lambda: now_s)
    assert budget.left == 2
    budget.spend()
    now_s = 60.0
    budget.spend()
    assert budget.left == 0

    now_s = 99.0
    assert budget.left == 0
    now_s = 100.0  # the first one has left the window
    assert budget.left == 1
    budget.spend()
    assert budget.left == 0
    now_s = 159.0
    assert budget.left == 0
    now_s = 1000.0
    assert budget.left == 2
    assert budget.num_restarts == 3


def test_a_rare_fault_never_exhausts_the_budget() -> None:
    now_s = 0.0
    budget = RestartBudget(1, 86_400.0, lambda: now_s)
    for day in range(30):
        now_s = day * 86_400.0
        budget.spend()
    assert budget.num_restarts == 30


def test_an_infinite_window_is_the_whole_run() -> None:
    now_s = 0.0
    budget = RestartBudget(1, now_s=lambda: now_s)
    budget.spend()
    now_s = 1e12
    assert budget.left == 0


@pytest.mark.parametrize(
    ("window_s", "text"), [(86_400.0, "3 restarts within 86,400 s"), (float("inf"), "3 restarts")]
)
def test_the_message_names_the_window(window_s: float, text: str) -> None:
    assert str(RestartBudget(3, window_s)) == text
