"""Checks the numbers that reward functions and the parsers of judges return."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from megarl.rewards.confined_call import ConfinedCallError


class NotAScoreError(ConfinedCallError):
    """A function returned something other than a finite number, or a dict with such a `score`."""


def finite_number(value: Any) -> float | None:
    """Return a finite float, or None. numpy and torch scalars count as numbers."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        return None

    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None

    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """Return the beginning of the value's text.

    Python does not print integers with more than a few thousand digits.
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"of {value.bit_length()} bits"
    return repr(value)[:60]
