"""The reward: 1 if the last number of a response is the ground truth, otherwise 0. Change it for your task.

python reward.py        # runs its test, without a model
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from megarl.rewards.thinking import outside_thinking

NUMBER = re.compile(r"(?<![\w.])-?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3})?")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score the response `solution_str`. The other arguments are columns of the data.

    An exception is reported as an error of the sample; it does not count as a score of 0.
    """
    numbers = [Decimal(number) for number in NUMBER.findall(plain(outside_thinking(solution_str)))]
    if not numbers:
        return {"score": 0.0, "answer": None}
    answer = f"{numbers[-1]:f}"

    return {
        "score": float(numbers[-1] == truth_of(ground_truth)),
        "answer": answer.rstrip("0").rstrip(".") if "." in answer else answer,
    }


def truth_of(ground_truth: Any) -> Decimal:
    """Return the correct number.

    It is the whole ground truth or, for a solution as in GSM8K, the text after `####`.
    """
    answer = plain(str(ground_truth).rpartition("####")[2]).strip()
    if not NUMBER.fullmatch(answer):
        raise ValueError(f"{ground_truth!r} is not a number; correct or remove the row")
    return Decimal(answer)


def plain(text: str) -> str:
    """Return the text without currency signs, percent signs and thousands separators.

    `-$1,109` becomes `-1109`.
    """
    return re.sub(r"[$€£%]|(?<=\d),(?=\d{3}(?!\d))", "", text.replace("\u2212", "-"))


def check_truth(ground_truth: Any) -> None:
    """Raise ValueError for a row that `megarl check` should refuse."""
    truth_of(ground_truth)


def answer_from_truth(ground_truth: Any) -> str:
    """Return a correct response, which `megarl check` scores."""
    return f"The answer is {truth_of(ground_truth)}."


def test() -> None:
    for response, truth, expected in (
        ("48 + 61 is 109", "109", 1.0),
        ("First 48, then $1,109.", "1109", 1.0),
        ("It costs $1,109.00", "48 * 23 + 5 = 1109\n#### 1,109", 1.0),
        ("109, I mean 108", "109", 0.0),
        ("-109", "109", 0.0),
        ("I do not know", "109", 0.0),
    ):
        score = compute_score("test", response, truth, {})["score"]
        assert score == expected, f"{response!r} for {truth!r} scores {score} instead of {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: all test responses have the expected score")
