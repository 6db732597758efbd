"""The reward is yours to write: `megarl init` found none that fits the answers of the data.

python reward.py        # its own test, without a model
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """`solution_str` is what the model wrote, the others are columns of the data. An exception is an error of
    the sample, not a 0."""
    raise NotImplementedError(
        "write compute_score in reward.py: return 1.0 for a right response and 0.0 for a wrong one"
    )


def test() -> None:
    for response, truth, expected in (
        ("a right response", "its ground truth", 1.0),  # replace these with responses to your own questions
        ("a wrong response", "its ground truth", 0.0),
    ):
        score = compute_score("test", response, truth, {})
        assert score == expected, f"{response!r} for {truth!r} has the score {score}, not {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: every response of its test has the score that it should have")
