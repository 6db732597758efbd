"""Test the number of restarts within a day."""

import pytest

from megarl.controller.restarts import RestartBudget

HOUR_S = 3600.0


def test_restarts_count_within_a_day_only() -> None:
    now_s = 0.0
    budget = RestartBudget(2, lambda: now_s)
    assert budget.left == 2
    budget.spend()
    now_s = 10 * HOUR_S
    budget.spend()
    assert budget.left == 0

    now_s = 23.9 * HOUR_S
    assert budget.left == 0
    now_s = 24 * HOUR_S  # a day after the first one
    assert budget.left == 1
    budget.spend()
    assert budget.left == 0
    now_s = 33.9 * HOUR_S
    assert budget.left == 0
    now_s = 100 * HOUR_S
    assert budget.left == 2
    assert budget.num_restarts == 3


def test_a_rare_fault_never_exhausts_the_budget() -> None:
    now_s = 0.0
    budget = RestartBudget(1, lambda: now_s)
    for day in range(30):
        now_s = day * 86_400.0
        budget.spend()
    assert budget.num_restarts == 30


@pytest.mark.parametrize(
    ("limit", "of", "text"),
    [
        (3, "", "3 restarts within a day are used up. "),
        (3, " of this process", "3 restarts within a day of this process are used up. "),
        (1, " of such processes", "1 restart within a day of such processes is used up. "),
        (0, "", "0 restarts within a day are used up. "),
    ],
)
def test_the_message_names_the_limit(limit: int, of: str, text: str) -> None:
    assert RestartBudget(limit).used_up(of).startswith(f"rollout.restart_limit: {text}")
