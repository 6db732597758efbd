"""Reward functions: what one must look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.machine.user_functions import Expected, UserFunctionError, load_function

RewardFunction = Callable[..., Any]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
EXAMPLE = "def compute_score(data_source, solution_str, ground_truth, extra_info):"


class RewardFunctionError(UserFunctionError):
    """A reward function cannot be used; the message names the file, the function and what to change."""


def load_reward_function(path: str, name: str) -> RewardFunction:
    """It will be called with the four keywords of ARGUMENTS. Raises RewardFunctionError, see load_function."""
    return load_function(path, name, Expected("reward function", "reward.functions' name", EXAMPLE, ARGUMENTS, error=RewardFunctionError))
