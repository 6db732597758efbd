"""The reward: 1 if the answer of a response is the ground truth, apart from case, spaces and punctuation
around it, else 0.

python reward.py        # its own test, without a model
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from megarl.rewards.thinking import outside_thinking


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """`solution_str` is what the model wrote, the others are columns of the data. An exception is an error of
    the sample, not a 0."""
    given = answer_in(outside_thinking(solution_str))
    return {"score": float(given == normal(str(ground_truth))), "answer": given or None}


def answer_in(response: str) -> str:
    """Return what follows the last "the answer is" or "answer:", otherwise the whole response."""
    return normal(re.split(r"answer(?: is)?:|answer is\b", response, flags=re.IGNORECASE)[-1])


def normal(text: str) -> str:
    """Return the text in one spelling. Remove more here if your answers allow it, such as articles."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .!?\"'`*")


def check_truth(ground_truth: Any) -> None:
    """`megarl check` refuses the rows for which this raises ValueError."""
    if not normal(str(ground_truth)):
        raise ValueError(f"{ground_truth!r} has no text; correct the row or leave it out")


def answer_from_truth(ground_truth: Any) -> str:
    """`megarl check` scores this response, which is right."""
    return f"The answer is: {ground_truth}"


def test() -> None:
    for response, truth, expected in (
        ("Emily Bronte", "Emily Bronte", 1.0),
        ("The answer is: **emily  bronte**.", "Emily Bronte", 1.0),
        ("It was Charlotte, so the answer is Charlotte Bronte", "Emily Bronte", 0.0),
        ("Emily Bronte or Anne Bronte", "Emily Bronte", 0.0),
        ("", "Emily Bronte", 0.0),
    ):
        score = compute_score("test", response, truth, {})["score"]
        assert score == expected, f"{response!r} for {truth!r} has the score {score}, not {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: every response of its test has the score that it should have")
