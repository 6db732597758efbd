"""Classifies the answers in a data file: numbers, mathematics, choices, tests of programs, or text.

The classification only determines which rewards are tried. Their scores determine whether they fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from megarl.config.schema import DataConfig
from megarl.data.prompts import GROUND_TRUTH, read_reward_inputs, read_reward_rows
from megarl.rewards.truths import is_null, short

LOOKS_SHARE = 0.8  # minimum fraction of answers that look like one kind
_MOST_CHOICES = 10
_ROWS_PER_CHOICE = 4
# Lengths in characters.
_LONGEST_CHOICE = 40
_LONGEST_TEXT = 100
_LETTER = re.compile(r"[A-J]", re.IGNORECASE)
_NUMBER = re.compile(r"-?[$€£]?-?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)(?:[eE][+-]?\d+)?\s*%?")
_DATE_OR_TIME = re.compile(r"\d+[-/.]\d+[-/.]\d+|\d:\d\d")
_MATH_WORDS = re.compile(
    r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+|\b(?:sin|cos|tan|log|ln|exp|sqrt|and|or)\b"
)
_TESTS = re.compile(r"\bassert\b.*\(|\"(?:stdin|call)\"\s*:")
_PROGRAM = re.compile(r"^\s*(?:(?:def|class) .*:|(?:from|import) [\w.]+.*|#include\b.*)\s*$", re.MULTILINE)


def share(looks_like: Callable[[Any], bool], answers: Sequence[Any]) -> float:
    return sum(map(looks_like, answers)) / max(len(answers), 1)


def looks_like_number(answer: Any) -> bool:
    if isinstance(answer, int | float):
        return not isinstance(answer, bool)
    return isinstance(answer, str) and _NUMBER.fullmatch(answer.rpartition("####")[2].strip()) is not None


def looks_mathematical(answer: Any) -> bool:
    if looks_like_number(answer):
        return True
    if not isinstance(answer, str):
        return False
    answer = answer.rpartition("####")[2]
    if "\\boxed" in answer:
        return True
    # LaTeX commands and function names are allowed; any other word makes it prose.
    has_words = re.search(r"[A-Za-z]{3,}", _MATH_WORDS.sub(" ", answer)) is not None

    return (
        not has_words
        and not _DATE_OR_TIME.search(answer)
        and re.search(r"[\d\\^=]|^\W*[A-Za-z]\W*$", answer) is not None
    )


def looks_like_tests(answer: Any) -> bool:
    if isinstance(answer, list):
        return bool(answer) and all(
            isinstance(test, dict) or (isinstance(test, str) and "assert" in test) for test in answer
        )
    return isinstance(answer, str) and _TESTS.search(answer) is not None


def find_choices(data: DataConfig) -> list[str]:
    """Return the distinct answers if there are only a few in many rows; otherwise an empty list."""
    labels: dict[str, str] = {}
    num_rows = 0

    # A long answer or too many labels rule out choices, so the remaining rows need not be read.
    for row in read_reward_rows([*data.train_files, *data.val_files], data.columns):
        answer = read_reward_inputs(row, data.columns).reward_model[GROUND_TRUTH]
        if is_null(answer):
            continue
        label = answer.strip(" ().") if isinstance(answer, str) else str(answer)
        labels.setdefault(label.casefold(), label)
        num_rows += 1
        if (
            not isinstance(answer, str | bool)
            or not 0 < len(label) <= _LONGEST_CHOICE
            or len(labels) > _MOST_CHOICES
        ):
            return []

    # Letters are choices in a file of any length, and a letter that no row has may be a choice too.
    if labels and all(_LETTER.fullmatch(label) for label in labels.values()):
        last = max(label.upper() for label in labels.values())
        return [chr(code) for code in range(ord("A"), max(ord(last), ord("B")) + 1)]

    if (
        len(labels) < 2
        or num_rows < _ROWS_PER_CHOICE * len(labels)
        or all(map(looks_like_number, labels.values()))
    ):
        return []

    return sorted(labels.values())


def why_not_text(answers: Sequence[Any]) -> str | None:
    """Explain why responses cannot be compared with these answers as text; None if they can."""
    if not answers:
        return "all of them are null"
    if share(lambda answer: isinstance(answer, list | dict), answers) >= LOOKS_SHARE:
        return f"they are lists or mappings, such as {short(answers[0])}"

    if (
        share(lambda answer: isinstance(answer, str) and _PROGRAM.search(answer) is not None, answers)
        >= LOOKS_SHARE
    ):
        return (
            "they are programs, and many programs solve the same task; give tests in a column `tests`, "
            "as docs/rewards.md describes"
        )

    # Models do not repeat long texts word for word.
    length = int(median(len(str(answer)) for answer in answers))
    if length > _LONGEST_TEXT:
        return f"they are texts of {length:,} characters (the median), which no response will repeat"
    return None
