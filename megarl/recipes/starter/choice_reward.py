"""The reward: 1 if the choice that a response names as its answer is the ground truth, else 0.

python reward.py        # its own test, without a model
"""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.thinking import outside_thinking

CHOICES = ["A", "B", "C", "D"]
# The longest first. A small letter must be followed by punctuation or the end of its line, because "a" is an
# article.
WORDS = [f"(?i:{re.escape(each)})" for each in sorted(CHOICES, key=len, reverse=True) if len(each) > 1]
LETTERS = [
    rf"{re.escape(each)}|{re.escape(each.lower())}(?=\W*$|[).:])" for each in CHOICES if len(each) == 1
]
ANY = "|".join(WORDS + LETTERS)
NAMED = re.compile(rf"(?<!\w)(?:{ANY})(?!\w)", re.MULTILINE)
LEADS = re.compile(rf"\W*({ANY})\W*(?:[.,:;)*]|$)")
SAYS_SO = re.compile(r"answer|(?:option|choice) is", re.IGNORECASE)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """`solution_str` is what the model wrote, the others are columns of the data. An exception is an error of
    the sample, not a 0."""
    given = choice_in(outside_thinking(solution_str))
    return {"score": float(given == truth_of(ground_truth)), "answer": given}


def choice_in(response: str) -> str | None:
    """Return the choice that a response names after its last "answer"; otherwise at the start of its last
    line ("B. A dog"), or last."""
    said = SAYS_SO.split(response)
    if len(said) > 1 and (named := NAMED.search(said[-1])):
        return normal(named.group())
    if leads := LEADS.match(response.strip().rpartition("\n")[2]):
        return normal(leads.group(1))
    all_named = NAMED.findall(response)

    return normal(all_named[-1]) if all_named else None


def truth_of(ground_truth: Any) -> str:
    """Return the right choice. Write `(A)` or `A.` for A if you like."""
    choice = normal(str(ground_truth).strip(" ()."))
    if choice not in map(normal, CHOICES):
        raise ValueError(f"{ground_truth!r} is none of {CHOICES}; correct the row or leave it out")
    return choice


def normal(choice: str) -> str:
    return choice.upper() if len(choice) == 1 else choice.casefold()


def check_truth(ground_truth: Any) -> None:
    """`megarl check` refuses the rows for which this raises ValueError."""
    truth_of(ground_truth)


def answer_from_truth(ground_truth: Any) -> str:
    """`megarl check` scores this response, which is right."""
    return f"The answer is {truth_of(ground_truth)}."


def test() -> None:
    for right, wrong in zip(CHOICES, [*CHOICES[1:], CHOICES[0]], strict=True):
        for response, expected in (
            (right, 1.0),
            (f"**{right}**", 1.0),
            (f"It is not {wrong}.\nThe answer is {right}, not {wrong}.", 1.0),
            (f"{right}. It cannot be {wrong}", 1.0),
            (wrong, 0.0),
            (f"The answer is {wrong}.", 0.0),
            ("", 0.0),
        ):
            score = compute_score("test", response, right, {})["score"]
            assert score == expected, f"{response!r} for {right!r} has the score {score}, not {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: every response of its test has the score that it should have")
