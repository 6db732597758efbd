"""Test the number of restarts within a window of time."""

import pytest

from megarl.controller.restarts import RestartBudget


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
    ("limit", "window_s", "of", "text"),
    [
        (3, 86_400.0, "", "3 restarts within 86,400 s are used up. "),
        (3, float("inf"), " of this process", "3 restarts of this process are used up. "),
        (1, float("inf"), "", "1 restart is used up. "),
        (1, 60.0, " of such processes", "1 restart within 60 s of such processes is used up. "),
        (0, float("inf"), "", "0 restarts are used up. "),
    ],
)
def test_the_message_names_the_window(limit: int, window_s: float, of: str, text: str) -> None:
    assert RestartBudget(limit, window_s).used_up(of).startswith(f"rollout.restart_limit: {text}")
