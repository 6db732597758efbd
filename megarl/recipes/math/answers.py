"""The types of answers that are compared: formulas, lists and sets, intervals, relations, and words."""

from __future__ import annotations

from typing import NamedTuple

from megarl.recipes.math.expression import Expression


class Formula(NamedTuple):
    """A formula with a unit, which is the words after it, such as "cm", or empty."""

    expression: Expression
    unit: str = ""


class Items(NamedTuple):
    """Several answers.

    `kind` is "list" without brackets, "set" for braces, or the two brackets, such as "(]".
    """

    kind: str
    items: tuple[Answer, ...]


class Interval(NamedTuple):
    """An interval of real numbers. An end is a number, or None if the interval is unbounded."""

    low: Expression | None
    high: Expression | None
    has_low: bool
    has_high: bool


class Union(NamedTuple):
    """A union of intervals; without intervals it is the empty set."""

    parts: tuple[Interval, ...]


class Relation(NamedTuple):
    """An equation or an inequality, or a chain of them, with at least two sides.

    `signs` are between the sides: "=", "\\approx", "\\ne", "<" or "\\le". `left` is the text of the first
    side, which may be only the name of the value after it.
    """

    left: str
    sides: tuple[Answer, ...]
    signs: tuple[str, ...]


class Words(NamedTuple):
    text: str


class Unread(NamedTuple):
    """Text that only Math-Verify may be able to parse."""

    text: str


Answer = Formula | Items | Union | Relation | Words | Unread
EMPTY = Union(())
