"""The types of answers that are compared: formulas, lists and sets, intervals, equations, and words."""

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


class Equation(NamedTuple):
    """An equation, or a chain of equations, with at least two sides."""

    sides: tuple[Answer, ...]


class Words(NamedTuple):
    text: str


class Unread(NamedTuple):
    """Text that only Math-Verify may be able to parse."""

    text: str


Answer = Formula | Items | Union | Equation | Words | Unread
EMPTY = Union(())
