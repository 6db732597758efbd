"""The reward: 1 if the final answer of a response equals the ground truth, otherwise 0.

The final answer is in the last \\boxed{}, and is compared as a mathematical expression.

python reward.py        # runs its test, without a model
"""

from __future__ import annotations

from typing import Any

from megarl.recipes.math import reward as math


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score the response `solution_str`. The other arguments are columns of the data.

    An exception is reported as an error of the sample; it does not count as a score of 0.
    """
    return math.compute_score(data_source, solution_str, answer_of(ground_truth), extra_info)


def answer_of(ground_truth: Any) -> Any:
    """Return the answer of a ground truth. If it is a solution with `####`, the answer follows that mark."""
    return ground_truth.rpartition("####")[2].strip() if isinstance(ground_truth, str) else ground_truth


def check_truth(ground_truth: Any) -> None:
    """Raise ValueError for a row that `megarl check` should refuse."""
    math.check_truth(answer_of(ground_truth))


def answer_from_truth(ground_truth: Any) -> str | None:
    """Return a correct response, which `megarl check` scores."""
    return math.answer_from_truth(answer_of(ground_truth))


def test() -> None:
    for response, truth, expected in (
        ("So it is \\boxed{\\frac{1}{2}}.", "1/2", 1.0),
        ("\\boxed{0.5}", "We halve it.\n#### \\frac{1}{2}", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("First \\boxed{\\frac{1}{2}}, no, \\boxed{\\frac{1}{3}}", "\\frac{1}{2}", 0.0),
        ("I do not know", "\\frac{1}{2}", 0.0),
    ):
        score = compute_score("test", response, truth, {})["score"]
        assert score == expected, f"{response!r} for {truth!r} scores {score} instead of {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: all test responses have the expected score")
