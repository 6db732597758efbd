"""The reward: 1 if the last number of a response is the ground truth, else 0. Change it to what your task
rewards.

python reward.py        # its own test, without a model
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
    """`solution_str` is what the model wrote, the others are columns of the data. An exception is an error of
    the sample, not a 0."""
    numbers = [Decimal(number) for number in NUMBER.findall(plain(outside_thinking(solution_str)))]
    if not numbers:
        return {"score": 0.0, "answer": None}
    answer = f"{numbers[-1]:f}"

    return {
        "score": float(numbers[-1] == truth_of(ground_truth)),
        "answer": answer.rstrip("0").rstrip(".") if "." in answer else answer,
    }


def truth_of(ground_truth: Any) -> Decimal:
    """Return the right number: the whole ground truth, or what follows `####` where it is a solution, as in
    GSM8K."""
    answer = plain(str(ground_truth).rpartition("####")[2]).strip()
    if not NUMBER.fullmatch(answer):
        raise ValueError(f"{ground_truth!r} is no number; correct the row or leave it out")
    return Decimal(answer)


def plain(text: str) -> str:
    """Return the text without currency signs, percent signs and thousands separators: `-$1,109` becomes
    `-1109`."""
    return re.sub(r"[$€£%]|(?<=\d),(?=\d{3}(?!\d))", "", text.replace("\u2212", "-"))


def check_truth(ground_truth: Any) -> None:
    """`megarl check` refuses the rows for which this raises ValueError."""
    truth_of(ground_truth)


def answer_from_truth(ground_truth: Any) -> str:
    """`megarl check` scores this response, which is right."""
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
        assert score == expected, f"{response!r} for {truth!r} has the score {score}, not {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: every response of its test has the score that it should have")
