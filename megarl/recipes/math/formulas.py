"""Compares formulas by their values at fixed points."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from fractions import Fraction

from megarl.recipes.math import numbers
from megarl.recipes.math.expression import Expression
from megarl.recipes.math.numbers import NoNumberError, Number

_NUM_POINTS = 8
_FEWEST_POINTS = 3  # minimum number of points at which two formulas must have values
_WHOLE = (2, 3, 5, 7)  # for formulas that have values only at integers, such as (-1)^n


def same_value(left: Expression, right: Expression) -> bool:
    names = left.names | right.names
    # Compare constants by their values, and decimals up to their last place.
    if not names:
        try:
            values = left.value({}), right.value({})
        except NoNumberError:
            return False
        places = [place for place in (left.last_place, right.last_place) if place is not None]
        return numbers.same_number(*values) or bool(places) and numbers.close_decimal(*values, max(places))

    agreed = 0
    # Formulas with variables are equal if they agree at enough points.
    for point in points(names):
        try:
            values = left.value(point), right.value(point)
        except NoNumberError:
            continue
        if not all(map(numbers.is_real, values)) and agreed >= _FEWEST_POINTS:
            continue
        if not numbers.same_number(*values):
            return False
        agreed += 1

    return agreed >= _FEWEST_POINTS


def points(names: frozenset[str]) -> list[Mapping[str, Number]]:
    """Return fixed values of the variables: first positive values, then integers and negative values."""

    def at(number: int, name: str) -> Fraction:
        digest = hashlib.sha256(f"{number} {name}".encode()).digest()
        return Fraction(11 + digest[0] % 89, 37)

    # The values are derived from a hash, so that a verdict never differs between processes.
    positive = [{name: at(number, name) for name in names} for number in range(_NUM_POINTS)]
    whole = [
        {name: Fraction(_WHOLE[(number + place) % len(_WHOLE)]) for place, name in enumerate(sorted(names))}
        for number in range(len(_WHOLE))
    ]
    negative = [{name: -value for name, value in point.items()} for point in positive[:3]]

    return [*positive, *whole, *negative]


def is_rounded(exact: Expression, rounded: Expression) -> bool:
    """Whether a number is the other one rounded to its last place, or to an integer."""
    if exact.names or rounded.names:
        return False
    try:
        values = exact.value({}), rounded.value({})
    except NoNumberError:
        return False
    if not all(map(numbers.is_real, values)):
        return False
    difference = abs(numbers.approximate(numbers.add(values[0], -values[1])))

    return bool(difference <= numbers.approximate(rounded.last_place or Fraction(1, 2)))


def sign_of_ratio(left: Expression, right: Expression) -> int | None:
    """Return the sign of the constant ratio of two formulas; None if the ratio is not constant and real."""
    if left.names != right.names or not left.names:
        return None
    ratio = None
    agreed = 0

    for point in points(left.names):
        try:
            ours = left.value(point)
            theirs = right.value(point)
            # Both must vanish at the same points, which do not determine the ratio.
            if ours == 0 or theirs == 0:
                if not (ours == 0 and theirs == 0):
                    return None
                continue
            current = numbers.divide(ours, theirs)
        except NoNumberError:
            continue
        if ratio is not None and not numbers.same_number(ratio, current):
            return None
        ratio = current
        agreed = agreed + 1

    if agreed < _FEWEST_POINTS or not numbers.is_real(ratio):
        return None
    return 1 if numbers.approximate(ratio).real > 0 else -1


def vanishes_with(truth: Expression, answer: Expression) -> bool:
    """Whether the answer's formula vanishes at all tested points where the truth's does.

    The points are found by solving for a variable in which the truth is linear. Then Math-Verify may find
    that the equations are equivalent, such as xy = 1 and y = 1/x.
    """
    if truth.names != answer.names or len(truth.names) < 2:
        return False
    for name in sorted(truth.names):
        found = 0
        for point in points(truth.names):
            try:
                at = [truth.value({**point, name: Fraction(value)}) for value in range(3)]
                slope = numbers.add(at[1], -at[0])
                if not numbers.same_number(numbers.add(at[2], -at[0]), numbers.multiply(Fraction(2), slope)):
                    break
                root = numbers.divide(-at[0], slope)
                value = answer.value({**point, name: root})
                scale = answer.value({**point, name: numbers.add(root, Fraction(1))})
            except NoNumberError:
                continue
            if abs(numbers.approximate(value)) > 2.0**-200 * (1 + abs(numbers.approximate(scale))):
                return False
            found += 1
        if found >= _FEWEST_POINTS:
            return True

    return False
