"""The reward, which you have to implement: `megarl init` found none that fits the answers in the data.

python reward.py        # runs its test, without a model
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    """Score the response `solution_str`. The other arguments are columns of the data.

    An exception is reported as an error of the sample; it does not count as a score of 0.
    """
    raise NotImplementedError(
        "implement compute_score in reward.py: return 1.0 for a correct response and 0.0 for a wrong one"
    )


def test() -> None:
    for response, truth, expected in (
        ("a correct response", "its ground truth", 1.0),  # replace these with your own examples
        ("a wrong response", "its ground truth", 0.0),
    ):
        score = compute_score("test", response, truth, {})
        assert score == expected, f"{response!r} for {truth!r} scores {score} instead of {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: all test responses have the expected score")
