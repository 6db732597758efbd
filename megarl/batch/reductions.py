"""How the parts of a metric come together: its name says it, so that engine and driver agree without knowing the metric.

A name that ends in `_max` or `_min` is an extreme: of parts the largest or smallest counts. All others are shares that add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MAXIMUM, MINIMUM = "_max", "_min"


def is_extreme(name: str) -> bool:
    return name.endswith((MAXIMUM, MINIMUM))


def combined(name: str, values: Sequence[float]) -> float:
    """Of a metric's parts over micro-batches or replicas, the whole. At least one value; a NaN among them is the result."""
    if any(math.isnan(value) for value in values):
        return math.nan
    if name.endswith(MAXIMUM):
        return max(values)
    if name.endswith(MINIMUM):
        return min(values)
    return sum(values)


def add_up(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """All metrics of disjoint rows; a metric that a part lacks has no share there."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: combined(name, [part[name] for part in parts if name in part]) for name in names}
