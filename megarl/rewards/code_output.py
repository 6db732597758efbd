"""Compares what a program printed with the expected output.

Numbers are compared by their values, within a tolerance, as the judges of APPS, TACO and LiveCodeBench do.
"""

from __future__ import annotations

import decimal
import re

# A number between spaces, brackets or commas. Quantifiers are possessive, so that long texts are read once.
_NUMBER = re.compile(
    r"(?<![\w.+-])([+-]?+(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]{1,4}+)?+)(?![\w.+-])"
)
_MARKS_OF_FLOATS = re.compile("[.eE]")
_CONTEXT = decimal.Context(prec=40, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)


def same_output(printed: str, expected: str, tolerance: float) -> bool:
    """Return whether a program's output is the expected one.

    Spaces at the ends of lines and blank lines at the beginning and the end are ignored. A number may be
    written in another way, such as 2.50 for 2.5 or 5.0 for 5, if one of the two has a decimal point or an
    exponent. If the expected one has, they may also differ by `tolerance`, absolute or relative to it.
    """
    lines = _lines(printed)
    expected_lines = _lines(expected)
    return len(lines) == len(expected_lines) and all(
        line == wanted or _same_line(line, wanted, tolerance)
        for line, wanted in zip(lines, expected_lines, strict=True)
    )


def _lines(text: str) -> list[str]:
    # At the beginning, only whole lines are removed, because indentation is a part of the output.
    lines = [line.rstrip() for line in text.rstrip().split("\n")]
    start = next((number for number, line in enumerate(lines) if line), 0)
    return lines[start:]


def _same_line(line: str, expected: str, tolerance: float) -> bool:
    # Numbers are the odd parts of a line, between the texts around them.
    parts = _NUMBER.split(line)
    wanted = _NUMBER.split(expected)
    return (
        len(parts) == len(wanted)
        and parts[::2] == wanted[::2]
        and all(
            part == want or _same_number(part, want, tolerance)
            for part, want in zip(parts[1::2], wanted[1::2], strict=True)
        )
    )


def _same_number(text: str, expected: str, tolerance: float) -> bool:
    is_float = bool(_MARKS_OF_FLOATS.search(expected))
    if not (is_float or _MARKS_OF_FLOATS.search(text)):
        return False

    number = decimal.Decimal(text)
    wanted = decimal.Decimal(expected)
    if not is_float:
        return number == wanted
    allowed = _CONTEXT.multiply(decimal.Decimal(str(tolerance)), _CONTEXT.max(1, _CONTEXT.abs(wanted)))
    return _CONTEXT.abs(_CONTEXT.subtract(number, wanted)) <= allowed
