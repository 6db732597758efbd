"""Parses decimals, repeating decimals and mixed numbers in text."""

from __future__ import annotations

import re
from fractions import Fraction

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
