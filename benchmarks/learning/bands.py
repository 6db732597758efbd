"""Means over seeds with 95 % intervals, and what may be concluded from them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

# 97.5 % quantiles of Student's t distribution, from one degree of freedom on.
_QUANTILES = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
)


class Band(NamedTuple):
    """A mean over seeds, and half of the width of its interval, which is infinite for one seed."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def band(values: Sequence[float]) -> Band:
    """Return mean ± t s / sqrt(n), where s is the standard deviation of a sample of n seeds.

    Raises:
        ValueError: There are no values, or more than the table of t has.
    """
    num_most = len(_QUANTILES) + 1
    if not 1 <= len(values) <= num_most:
        raise ValueError(f"a band is of 1 to {num_most} seeds, not {len(values)}")
    if len(values) == 1:
        return Band(values[0], inf)

    return Band(fmean(values), _QUANTILES[len(values) - 2] * stdev(values) / sqrt(len(values)))
