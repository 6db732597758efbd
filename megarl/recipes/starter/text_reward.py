"""The reward: 1 if the answer of a response is the ground truth, otherwise 0.

Case, spaces and surrounding punctuation are ignored.

python reward.py        # runs its test, without a model
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from megarl.rewards.thinking import outside_thinking


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score the response `solution_str`. The other arguments are columns of the data.

    An exception is reported as an error of the sample; it does not count as a score of 0.
    """
    given = answer_in(outside_thinking(solution_str))
    return {"score": float(given == normal(str(ground_truth))), "answer": given or None}


def answer_in(response: str) -> str:
    """Return the text after the last "the answer is" or "answer:", otherwise the whole response."""
    return normal(re.split(r"answer(?: is)?:|answer is\b", response, flags=re.IGNORECASE)[-1])


def normal(text: str) -> str:
    """Return the normalized text. Normalize more if your answers allow it, such as articles."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).strip(" .!?\"'`*")


def check_truth(ground_truth: Any) -> None:
    """Raise ValueError for a row that `megarl check` should refuse."""
    if not normal(str(ground_truth)):
        raise ValueError(f"{ground_truth!r} has no text; correct or remove the row")


def answer_from_truth(ground_truth: Any) -> str:
    """Return a correct response, which `megarl check` scores."""
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
        assert score == expected, f"{response!r} for {truth!r} scores {score} instead of {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: all test responses have the expected score")
