"""Reward of the tutorial: 1 if the last number of the answer is the sum, else 0.

`python -m examples.tutorial.reward` tests it.
"""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score one response. `answer` is compared between the samples of a prompt, for `maj@k`."""
    numbers = re.findall(r"\d+", solution_str)
    answer = numbers[-1] if numbers else ""
    return {"score": float(answer == ground_truth), "answer": answer}


def self_test() -> None:
    scores = {
        "3 + 4 = 7": 1.0,
        "The answer is 7.": 1.0,
        "7 is what 3 and 4 make": 0.0,  # only the last number counts, so listing many numbers does not help
        "To add 3 and 4, we": 0.0,
        "seven": 0.0,
        "17": 0.0,
        "": 0.0,
    }
    for response, expected in scores.items():
        score = compute_score("sums", response, "7", {})["score"]
        if score != expected:
            raise SystemExit(f"{response!r} scores {score}, not {expected}")

    print(f"the reward is right for {len(scores)} answers")


if __name__ == "__main__":
    self_test()
