"""The reward: 1 if the final answer of a response, in its last \\boxed{}, equals the ground truth as a
mathematical expression, else 0.

python reward.py        # its own test, without a model
"""

from __future__ import annotations

from typing import Any

from megarl.recipes.math import reward as math


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """`solution_str` is what the model wrote, the others are columns of the data. An exception is an error of
    the sample, not a 0."""
    return math.compute_score(data_source, solution_str, answer_of(ground_truth), extra_info)


def answer_of(ground_truth: Any) -> Any:
    """Return the answer alone: what follows `####` where the ground truth is a solution that ends with it."""
    return ground_truth.rpartition("####")[2].strip() if isinstance(ground_truth, str) else ground_truth


def check_truth(ground_truth: Any) -> None:
    """`megarl check` refuses the rows for which this raises ValueError."""
    math.check_truth(answer_of(ground_truth))


def answer_from_truth(ground_truth: Any) -> str | None:
    """`megarl check` scores this response, which is right."""
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
        assert score == expected, f"{response!r} for {truth!r} has the score {score}, not {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: every response of its test has the score that it should have")
