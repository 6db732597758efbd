"""The reward: 1 if the choice that a response gives as its answer is the ground truth, otherwise 0.

python reward.py        # runs its test, without a model
"""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.thinking import outside_thinking

CHOICES = ["A", "B", "C", "D"]
# The longest choices come first. A lower-case letter must be followed by punctuation or the end of its line,
# because "a" is an article.
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
    """Score the response `solution_str`. The other arguments are columns of the data.

    An exception is reported as an error of the sample; it does not count as a score of 0.
    """
    given = choice_in(outside_thinking(solution_str))
    return {"score": float(given == truth_of(ground_truth)), "answer": given}


def choice_in(response: str) -> str | None:
    """Return the choice that a response gives as its answer.

    It is the first choice after the last "answer" in the response, otherwise the one at the start of its last
    line ("B. A dog"), otherwise the last choice.
    """
    said = SAYS_SO.split(response)
    if len(said) > 1 and (named := NAMED.search(said[-1])):
        return normal(named.group())
    if leads := LEADS.match(response.strip().rpartition("\n")[2]):
        return normal(leads.group(1))
    all_named = NAMED.findall(response)

    return normal(all_named[-1]) if all_named else None


def truth_of(ground_truth: Any) -> str:
    """Return the correct choice. `(A)` and `A.` are accepted for A."""
    choice = normal(str(ground_truth).strip(" ()."))
    if choice not in map(normal, CHOICES):
        raise ValueError(f"{ground_truth!r} is not one of {CHOICES}; correct or remove the row")
    return choice


def normal(choice: str) -> str:
    return choice.upper() if len(choice) == 1 else choice.casefold()


def check_truth(ground_truth: Any) -> None:
    """Raise ValueError for a row that `megarl check` should refuse."""
    truth_of(ground_truth)


def answer_from_truth(ground_truth: Any) -> str:
    """Return a correct response, which `megarl check` scores."""
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
            assert score == expected, f"{response!r} for {right!r} scores {score} instead of {expected}"


if __name__ == "__main__":
    test()
    print("reward.py: all test responses have the expected score")
