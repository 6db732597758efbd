"""Arithmetic that is exact for rationals and has 120 digits for other numbers.

The size of numbers is limited.
"""

from __future__ import annotations

import math
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
