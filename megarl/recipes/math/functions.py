"""The functions of formulas, which are exact if their value is a fraction."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from megarl.recipes.math import numbers
from megarl.recipes.math.numbers import NoNumberError, Number, TooLargeError, context

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
    approximate = numbers.approximate(value)
    if name == "exp":
        return numbers.power(context.mpf(context.e), value)
    if name in ("ln", "log") and approximate == 0:
        raise NoNumberError("the logarithm of zero")
    if abs(approximate) >= 2**60:
        raise TooLargeError("the argument is too large")
    result = FUNCTIONS[name](approximate)
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

    return numbers.power(value, 1 / degree if isinstance(degree, Fraction) else context.mpf(1) / degree)


def _exact_root(value: int, degree: int) -> int | None:
    if value.bit_length() > 2000 or degree > 64:
        return None
    root = int(context.nint(context.power(value, context.mpf(1) / degree)))
    return root if root**degree == value else None


def logarithm(value: Number, base: Number) -> Number:
    return numbers.divide(apply_function("ln", value), apply_function("ln", base))
