"""Splits an answer at the commas, words and signs outside its brackets."""

from __future__ import annotations

import re

_RELATIONS = re.compile(
    r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\in(?![A-Za-z])|\\approx|<=|>=|!=|<|>|=)"
)
_SAME_SIGNS = {"<=": "\\le", ">=": "\\ge", "!=": "\\ne"}
# Commas between digits that may separate thousands or items; items do not begin with a zero.
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,[1-9]\d\d)+(?!\d|,\d)")
OR = re.compile(r'\s*(?:"\s*,?or\s*"|\bor\b|\\lor|\\vee)\s*')
AND = re.compile(r'\s*(?:,\s*)?(?:"\s*,?and\s*"|\band\b|\\land|\\wedge|\\&)\s*')


def split(text: str, separator: str = ",") -> list[str]:
    """Split text at commas outside brackets and outside numbers such as 1,000."""
    parts = []
    depth = 0
    start = 0
    # Commas within a number such as 1,000 are not separators.
    thousands = (
        {
            at
            for found in re.finditer(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)", text)
            for at in range(*found.span())
        }
        if separator == ","
        else set()
    )

    for at, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and at not in thousands and text.startswith(separator, at):
            parts.append(text[start:at])
            start = at + len(separator)

    return [*parts, text[start:]]


def with_wide_commas(text: str) -> str:
    """Return the text with a space after each comma that may separate thousands or items."""
    return _THOUSANDS.sub(lambda found: found.group().replace(",", ", "), text)


def listed(text: str) -> list[str]:
    """Split text at "and" and at commas; return it whole if a part would be empty."""
    joined = AND.split(text)
    parts = [part for each in joined for part in split(each)]
    if len(joined) > 1 and all(joined):
        return [part for part in parts if part.strip()]
    return parts if all(part.strip() for part in parts) else [text]


def sides_of(text: str) -> tuple[list[str], list[str]]:
    """Split text at the signs of relations outside brackets; return the sides and the signs."""
    sides = [""]
    signs: list[str] = []
    for at, part in enumerate(_RELATIONS.split(text)):
        # `P(X = 1)` is one side.
        if at % 2 == 0 or not is_balanced(sides[-1]):
            sides[-1] += part
        else:
            signs.append(_SAME_SIGNS.get(part, part))
            sides.append("")

    return [side.strip() for side in sides], signs


def is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0
