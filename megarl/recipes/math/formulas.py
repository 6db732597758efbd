"""Compares formulas by their values at fixed points, and recognizes equations that only name a value.

The value that follows a name is an answer of its own: `x = 5` means `5`. The right side of any other equation
is not: `x + y = 5` is a line, and `3x = 9` is not solved.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from fractions import Fraction

from megarl.recipes.math import numbers
from megarl.recipes.math.expression import GREEK_NAMES, Expression, is_prose
from megarl.recipes.math.numbers import FUNCTIONS, NoNumberError, Number

_NUM_POINTS = 8
_FEWEST_POINTS = 3  # minimum number of points at which two formulas must have values
_WHOLE = (2, 3, 5, 7)  # for formulas that have values only at integers, such as (-1)^n
_GREEK = "|".join(sorted(GREEK_NAMES, key=len, reverse=True))
_LETTER = rf"(?:[A-Za-z]|(?:\\(?:{_GREEK}|ell|hbar)|\b(?:{_GREEK}))(?![A-Za-z]))"
_BELOW = r"(?:_\s*(?:\{[^{}]*\}|\\[a-z]+|\w))"
_MARKS = rf"(?:\s*(?:{_BELOW}|'|\^\s*\{{?\s*(?:\*|\\ast|\\circ)\s*\}}?))*"
# A point is a capital letter; two to five of them are a segment, a polygon or an abbreviation.
_POINTS = rf"[A-Z]{_MARKS}(?:\s*[A-Z]{_MARKS}){{1,4}}"
_ACCENTED = (
    r"\\(?:overline|overrightarrow|overleftrightarrow|widehat|widetilde|hat|bar|vec|tilde|d?dot)"
    r"(?![A-Za-z])\s*"
    rf"(?:\{{\s*(?:{_POINTS}|{_LETTER}{_MARKS})\s*\}}|{_LETTER}){_MARKS}"
)
_LABEL = (
    rf"(?:\\(?:measured|spherical)?angle\s*(?:[A-Z]{_MARKS}\s*)+"
    rf"|\\(?:tri|square)angle\s*{_POINTS}|{_ACCENTED})"
)
_VARIABLE = re.compile(rf"{_LETTER}{_MARKS}")
# The arguments of a function are values and events: `f(x+1) = ...` is an equation for f.
_ARGUMENT = r"-?(?:[\w\s{}|'.]|\\(?:frac|sqrt|pi|cap|cup|mid|infty|theta|alpha|omega|lambda|bar|overline)\b)+"
_CALL = rf"\s*(?:\(\s*{_ARGUMENT}(?:,\s*{_ARGUMENT})*\)|\[\s*[A-Z]\w*\s*\])"
_OPERATOR = r"\\?(?:gcd|lcm|det|dim|deg|rank|tr|arg|max|min|[VvCc](?:ar|ov))(?![A-Za-z])"
_SET = r"(?:[A-Z]'?|\\overline\s*\{[A-Z]\}|\\complement\s*(?:_\s*\{?\w\}?)?\s*[A-Z])(?:\s*\^\s*\{?[cC]\}?)?"
_NAME = re.compile(
    "|".join(
        (
            rf"(?:{_LETTER}|{_ACCENTED}|\\mathbb\s*\{{[EP]\}}){_MARKS}"
            rf"(?:\s*\^\s*\{{?-1\}}?)?(?:{_CALL})?{_MARKS}",
            rf"\|?\s*(?:{_POINTS}|{_ACCENTED})\s*\|?|\\frac\s*\{{\s*{_POINTS}\s*\}}\s*\{{\s*{_POINTS}\s*\}}",
            rf"{_POINTS}\s*[/:]\s*{_POINTS}",
            rf"[A-Z]{_MARKS}\s*\^\s*\{{?(?:-1|T|\\top)\}}?",
            rf"m?\s*{_LABEL}",
            rf"\(\s*{_LETTER}{_MARKS}(?:,\s*{_LETTER}{_MARKS})+\)",
            rf"{_LETTER}{_MARKS}(?:\s*:\s*{_LETTER}{_MARKS})+",
            r"\\frac\s*\{\s*(?:d|\\partial)(?![\w]*\d)[^{}]*\}\s*\{\s*(?:d|\\partial)[^{}]*\}",
            rf"\|?\(?{_SET}(?:\s*\\(?:cap|cup|setminus)\s*\(?{_SET}\)?)+\|?",
            r"\\(?:lim|sum|prod|i*int)(?![A-Za-z])[^+]*|[PE]\s*\([^()]*\)",
            rf"{_OPERATOR}(?:_\s*\{{[^{{}}]*\}})?\s*"
            rf"(?:\([^()=]*\)|\{{[^{{}}=]*\}}|{_LETTER}{_MARKS}(?:{_CALL})?)",
        )
    )
)
# Words, also with the points or the argument that they are about: `"Area of" ABC`, `"Var"(X)`.
_WORDS = re.compile(
    rf"(?:{_LETTER}{_MARKS}\s*)?\"[^\"\d=]+\"\s*(?:\\(?:tri|square)angle\s*)?"
    rf"(?:{_POINTS}|{_LETTER}{_MARKS}|[(\[][^()=\[\]]*[)\]])?\s*(?:\"[^\"\d=]*\")?"
)
_ANGLE = rf"(?:\\angle\s*[A-Z]+|[A-Z]|(?:2\s*)?\\(?:{_GREEK}))"
_ASKED_FOR = re.compile(
    rf"\\?(?:sin|cos|tan|cot|sec|csc)\s*(?:{_ANGLE}|\(\s*{_ANGLE}\s*\))|\|\s*{_LETTER}{_MARKS}\s*\|"
)


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


def is_variable(text: str) -> bool:
    """Whether the text is a single letter with an optional index."""
    return _VARIABLE.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Whether the text only names a value, so that an equation with it on the left states that value."""
    if len(text) > 100:
        return False
    if _NAME.fullmatch(text) or _WORDS.fullmatch(text):
        return True

    words = text.split()
    return all(map(str.isalpha, words)) and any(map(is_prose, words)) and not FUNCTIONS.keys() & set(words)


def is_label(text: str) -> bool:
    """Whether the text denotes a geometric object or a marked letter, not a product of its letters."""
    return len(text) <= 100 and re.fullmatch(_LABEL, text) is not None


def is_asked_for(text: str) -> bool:
    """Whether the text is a quantity that a problem asks for, such as `\\sin A` or `|z|`."""
    return len(text) <= 100 and _ASKED_FOR.fullmatch(text) is not None
