"""Arithmetic that is exact for rationals and has 120 digits for other numbers, and numbers in text.

The size of numbers is limited.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

_PRECISION = 400  # bits
_SAME = 2.0**-300  # relative error of two numbers that are equal
_ZERO = 2.0**-350  # relative size of a sum that is considered zero after cancellation
_MOST_BITS = 200_000  # maximum size of an exact number
_MOST_EXPONENT = 2**60
_LARGEST_EXACT_FACTORIAL = 5000

context = mpmath.MPContext()
context.prec = _PRECISION
Number = Any  # Fraction if it is exact, otherwise context.mpf or context.mpc


class NoNumberError(ValueError):
    """The expression has no value, for example because of a division by zero."""


class TooLargeError(NoNumberError):
    """The value is too large to be computed."""


def approximate(value: Number) -> Any:
    return context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def add(left: Number, right: Number) -> Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left + right
    left = approximate(left)
    right = approximate(right)
    # A difference of nearly equal numbers is only rounding error.
    total = left + right
    if abs(total) <= _ZERO * max(abs(left), abs(right)):
        return Fraction(0)

    return total


def multiply(left: Number, right: Number) -> Number:
    if (
        isinstance(left, Fraction)
        and isinstance(right, Fraction)
        and _bits(left) + _bits(right) <= _MOST_BITS
    ):
        return left * right
    return _finite(approximate(left) * approximate(right))


def divide(left: Number, right: Number) -> Number:
    if right == 0:
        raise NoNumberError("division by zero")
    return multiply(left, 1 / right if isinstance(right, Fraction) else context.mpf(1) / right)


def power(base: Number, exponent: Number) -> Number:
    if (
        isinstance(base, Fraction)
        and base in (0, 1, -1)
        and isinstance(exponent, Fraction)
        and exponent.denominator == 1
    ):
        if base == 0 and exponent <= 0:
            raise NoNumberError("a power of zero")
        return base if exponent % 2 else abs(base)

    if isinstance(exponent, Fraction):
        # Exact powers are limited, because a response could require any number of digits.
        if abs(exponent) >= _MOST_EXPONENT:
            raise TooLargeError("the exponent is too large")
        if (
            exponent.denominator == 1
            and isinstance(base, Fraction)
            and abs(exponent) * _bits(base) <= _MOST_BITS
        ):
            return base**exponent.numerator
        base = approximate(base)
        if (
            # An odd root of a negative number is real, where mpmath gives the complex principal root.
            exponent.denominator % 2
            and exponent.denominator > 1
            and isinstance(base, context.mpf)
            and base < 0
        ):
            sign = -1 if exponent.numerator % 2 else 1
            return sign * context.power(-base, approximate(exponent))
        if base == 0 and exponent < 0:
            raise NoNumberError("a power of zero")
        return _finite(
            context.power(base, exponent.numerator if exponent.denominator == 1 else approximate(exponent))
        )

    base = approximate(base)
    exponent = approximate(exponent)
    if base == 0 or abs(exponent) * (abs(context.log(abs(base))) + 4) >= _MOST_EXPONENT:
        raise TooLargeError("the power is too large")

    return _finite(context.power(base, exponent))


def factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise NoNumberError("the factorial of a negative number")
        if value <= _LARGEST_EXACT_FACTORIAL:
            return Fraction(math.factorial(value.numerator))

    if abs(value) >= 2**50:
        raise TooLargeError("the factorial is too large")
    return _finite(context.factorial(approximate(value)))


def double_factorial(value: Number) -> Number:
    if (
        not isinstance(value, Fraction)
        or value.denominator != 1
        or not 0 <= value <= _LARGEST_EXACT_FACTORIAL
    ):
        raise NoNumberError("the double factorial of such a number")
    return Fraction(math.prod(range(value.numerator, 0, -2)))


def binomial(above: Number, below: Number) -> Number:
    exact = [
        each
        for each in (above, below)
        if isinstance(each, Fraction) and each.denominator == 1 and 0 <= each <= _LARGEST_EXACT_FACTORIAL
    ]
    # Small binomials are exact; others are approximated by the gamma function.
    if len(exact) == 2:
        return Fraction(math.comb(above.numerator, below.numerator))
    if max(abs(above), abs(below)) >= 2**50:
        raise TooLargeError("the binomial coefficient is too large")

    return _finite(context.binomial(approximate(above), approximate(below)))


def same_number(left: Number, right: Number) -> bool:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left = approximate(left)
    right = approximate(right)
    return bool(abs(left - right) <= _SAME * max(abs(left), abs(right)))


def close_decimal(left: Number, right: Number, last_place: Fraction) -> bool:
    """Whether two real numbers agree up to the decimal digit at `last_place`.

    They have to agree in six digits: 0.333333 equals 1/3, 0.33 does not.
    """
    left = approximate(left)
    right = approximate(right)
    if isinstance(left, context.mpc) or isinstance(right, context.mpc):
        return False
    difference = abs(left - right)

    return bool(difference <= approximate(last_place) and difference <= 2e-6 * max(abs(left), abs(right)))


def is_real(value: Number) -> bool:
    return not isinstance(value, context.mpc) or abs(value.imag) <= _SAME * abs(value.real)


def _finite(value: Any) -> Any:
    if not context.isfinite(value):
        raise NoNumberError("the value is not finite")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


# ---- functions


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(context, name)
        for name in ("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "exp", "ln")
    },
    **{f"arc{name}": getattr(context, f"a{name}") for name in ("sin", "cos", "tan")},
    "log": context.ln,
}


def apply_function(name: str, value: Number) -> Number:
    if name == "ln" and value == 1:
        return Fraction(0)
    near = approximate(value)
    if name == "exp":
        return power(context.mpf(context.e), value)
    if name in ("ln", "log") and near == 0:
        raise NoNumberError("the logarithm of zero")
    if abs(near) >= 2**60:
        raise TooLargeError("the argument is too large")
    result = FUNCTIONS[name](near)
    if not context.isfinite(result) or abs(result) > 2.0**300:
        raise NoNumberError("the value is not finite")

    # A value that should be 0, such as sin(pi), is only rounded to almost 0.
    return Fraction(0) if abs(result) < 2.0**-350 else result


def root(value: Number, degree: Number) -> Number:
    if degree == 0:
        raise NoNumberError("the root of degree zero")
    if (
        isinstance(value, Fraction)
        and value >= 0
        and isinstance(degree, Fraction)
        and degree.denominator == 1
        and degree > 0
    ):
        # An exact root keeps later comparisons exact.
        exact = [_exact_root(part, degree.numerator) for part in (value.numerator, value.denominator)]
        if None not in exact:
            return Fraction(exact[0], exact[1])  # pyrefly: ignore[bad-argument-type]

    return power(value, 1 / degree if isinstance(degree, Fraction) else context.mpf(1) / degree)


def _exact_root(value: int, degree: int) -> int | None:
    if value.bit_length() > 2000 or degree > 64:
        return None
    root = int(context.nint(context.power(value, context.mpf(1) / degree)))
    return root if root**degree == value else None


def logarithm(value: Number, base: Number) -> Number:
    return divide(apply_function("ln", value), apply_function("ln", base))


# ---- numbers in text


LONGEST_NUMBER = 5000  # digits
_LONGEST_PERIOD = 20  # maximum digits of the period of a decimal that ends in dots
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\overline\s*\{\s*(\d+)\s*\}|\\bar\s*\{\s*(\d+)\s*\}"
    r"|\\dot\s*\{\s*(\d)\s*\}|\(\s*(\d+)\s*\))"
)
_DOTS = re.compile(r"(?<![\d.])(\d*)\.(\d+)\s*(?:\\ldots|\\dots|\\cdots|\.\.\.|…)")
_MIXED = re.compile(
    r"(?<![\w.^_{/\\)])(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}"
    r"|(?<![\w.^_{/\\)])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])"
)
_SHORT_FRACTION = re.compile(
    r"\\frac\s*(\d)\s*(\d)|\\frac\s*(\{[^{}]*\})\s*(\d|[A-Za-z])(?![\d])|\\frac\s*(\d)\s*(?=\{)"
)


class UnreadableError(ValueError):
    """The text is not a formula that this module can parse."""


def read_decimal(text: str) -> tuple[Fraction, Fraction] | None:
    """Return the value and the last place of a decimal number, also in scientific notation."""
    dots = _DOTS.fullmatch(text.strip().lstrip("+-"))
    # Dots without a repeating period only mean that the digits continue.
    if dots and _period(dots.group(2)) is None:
        text = text.strip()[: len(text.strip()) - len(dots.group()) + dots.end(2)]
    found = re.fullmatch(
        r"\s*([+-]?)\s*(\d{1,3}(?:(?:,|\{,\})\d{3})+|\d*)\.(\d+)\s*"
        r"(?:[eE]([+-]?\d+)|(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*(-?\d+)\s*\}?)?\s*",
        text,
    )
    # Huge numbers would take unbounded time and memory.
    if found is None or len(text) > LONGEST_NUMBER:
        return None
    sign, whole, decimals, short, long = found.groups()
    exponent = int(short or long or 0)
    if abs(exponent) > LONGEST_NUMBER:
        return None
    scale = Fraction(10) ** (exponent - len(decimals))
    digits = int(re.sub(r"\D", "", whole) + decimals)

    return (-digits if sign == "-" else digits) * scale, scale


def _period(decimals: str) -> tuple[str, str] | None:
    """Return the digits before the period of a repeating decimal, and the period.

    The period must be shown three times, or twice if it has several digits.
    """
    for length in range(1, min(len(decimals) // 2, _LONGEST_PERIOD) + 1):
        period = decimals[-length:]
        repeated = re.search(f"(?:{period})+$", decimals)
        assert repeated is not None, "the decimals end in the period"
        shown = len(repeated.group()) // length
        if shown >= (3 if length == 1 else 2):
            return decimals[: len(decimals) - shown * length], period
    return None


def with_plain_fractions(text: str) -> str:
    """Return the text with repeating decimals and mixed numbers as fractions in parentheses.

    Braces are added around the parts of fractions.
    """

    def repeating(whole: str, before: str, period: str) -> str:
        value = Fraction(int(whole or 0)) + Fraction(int(before or 0), 10 ** len(before))
        # The repeating decimal 0.ppp... of a period with n digits is p / (10 ** n - 1).
        value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(before))
        return f"({value.numerator}/{value.denominator})"

    def with_dots(found: re.Match[str]) -> str:
        period = _period(found.group(2))
        return repeating(found.group(1), *period) if period else found.group()

    def mixed(found: re.Match[str]) -> str:
        whole, above, below = (group for group in found.groups() if group is not None)
        return f"({whole}+{above}/{below})" if int(above) < int(below) else found.group()

    def short(found: re.Match[str]) -> str:
        one, two, braced, after, alone = found.groups()
        if one:
            return f"\\frac{{{one}}}{{{two}}}"
        return f"\\frac{braced}{{{after}}}" if braced else f"\\frac{{{alone}}}"

    if len(text) > LONGEST_NUMBER:
        raise UnreadableError("it is too long")
    # Rewrite `\frac12`, repeating decimals and mixed numbers, in this order.
    text = _SHORT_FRACTION.sub(short, text)
    text = _REPEATING.sub(
        lambda found: repeating(found.group(1), found.group(2), next(filter(None, found.groups()[2:]))), text
    )

    return _MIXED.sub(mixed, _DOTS.sub(with_dots, text))
