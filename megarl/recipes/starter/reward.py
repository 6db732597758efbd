"""The reward: 1 where the last number of a response is the ground truth, else 0. Change it to what your task rewards.

python reward.py        # its own test, without a model
"""

from __future__ import annotations

import re
from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """`solution_str` is what the model wrote, the others are columns of the data. An exception is an error of the sample, not a 0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", solution_str.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(ground_truth))


def test() -> None:
    for response, truth, expected in (
        ("48 + 61 is 109", "109", 1.0),
        ("First 48, then 1,109.", "1109", 1.0),
        ("109, I mean 108", "109", 0.0),
        ("I do not know", "109", 0.0),
    ):
        score = compute_score("test", response, truth, {})
        assert score == expected, f"{response!r} for {truth!r} has the score {score}, not {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: every response of its test has the score that it should have")
