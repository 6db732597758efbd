"""Score the tasks of reasoning-gym with its verifiers, GSM8K by its answers, and guessing with its environment.

A model of this size writes sentences, and a verifier gives the full score only to the bare answer. So the
verifier reads the last number of the response: the last one, because a model could list all numbers.
"""

from __future__ import annotations

import re
from typing import Any

from megarl.recipes.quickstart.reward import compute_score as verify

_NUMBER = re.compile(r"(?<!\d)-?\d+")


def last_number(text: str) -> str:
    """Return the last number of a text, or nothing. A hyphen between two numbers is no sign."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score one response. `answer` is compared between the samples of a prompt, for `maj@k`."""
    answer = last_number(solution_str)
    return {"score": verify(data_source, answer, ground_truth, extra_info), "answer": answer}


def compare_numbers(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Score 1 if the last number, in which a comma may separate thousands, is the answer, else 0."""
    answer = last_number(re.sub(r"(?<=\d),(?=\d{3})", "", solution_str))
    return {"score": float(answer == ground_truth), "answer": answer}


def no_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Score nothing: the environment rewards the guess."""
    return 0.0
