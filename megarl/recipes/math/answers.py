"""The kinds of answers that are compared: formulas, lists and sets, intervals, equations, and words."""

from __future__ import annotations

from typing import NamedTuple

from megarl.recipes.math.expression import Expression


class Formula(NamedTuple):
    """unit: The words after it, such as "cm"; empty if there are none."""

    expression: Expression
    unit: str = ""


class Items(NamedTuple):
    """kind: "list" for what only commas separate, "set" for braces, else the two brackets, such as "(]"."""

    kind: str
    items: tuple[Answer, ...]


class Interval(NamedTuple):
    """Part of the real line. An end is a number, or None where there is no end."""

    low: Expression | None
    high: Expression | None
    has_low: bool
    has_high: bool


class Union(NamedTuple):
    """Intervals; none for the empty set."""

    parts: tuple[Interval, ...]


class Equation(NamedTuple):
    """sides: At least two, of an equation or a chain of them."""

    sides: tuple[Answer, ...]


class Words(NamedTuple):
    text: str


class Unread(NamedTuple):
    """What only Math-Verify may read."""

    text: str


Answer = Formula | Items | Union | Equation | Words | Unread
EMPTY = Union(())
