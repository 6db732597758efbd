"""How the parts of a metric come together: each says it itself, so that engine, workers and roles agree
without knowing the metric.

A loss gives the parts of a micro-batch. Those of one update, which are of disjoint rows, are merged over the
micro-batches of a replica, then over replicas; a step's values are taken over its updates:

    reduction   parts of one update                  updates of a step
    sum         add up                               mean
    mean        totals and counts add up; quotient   mean
    max, min    extreme                              extreme
    same        alike in all, or ValueError          mean

A part whose count is 0 has nothing to say, nor has one that lacks the metric: what nobody has anything to say
of is no metric of the step. A NaN is never lost. A mean whose denominator is fixed before the rows are cut
(MiniBatchCounts) is a sum: of shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class Reduction(Enum):
    sum = "sum"
    mean = "mean"
    max = "max"
    min = "min"
    same = "same"


@dataclass(frozen=True)
class Metric:
    """A part, of scalars. value: of a mean the total. count: of what the value was made."""

    reduction: Reduction
    value: Tensor | float
    count: Tensor | float = 1.0

    @classmethod
    def sum(cls, value: Tensor | float) -> Metric:
        """A share of what the parts add up to: a count, or a value that is divided by a count of the whole
        mini-batch."""
        return cls(Reduction.sum, _detached(value))

    @classmethod
    def mean(cls, values: Tensor, mask: Tensor) -> Metric:
        """Over the True places of all parts' masks, each weighing the same. values, mask: of one shape."""
        return cls(Reduction.mean, torch.where(mask, values.detach(), 0.0).sum(), mask.sum())

    @classmethod
    def ratio(cls, total: float, count: float) -> Metric:
        """What all parts have together, for each of what they count together."""
        return cls(Reduction.mean, total, count)

    @classmethod
    def max(cls, values: Tensor, mask: Tensor) -> Metric:
        """The largest over the True places of all parts' masks. values, mask: of one shape, not empty."""
        return cls(Reduction.max, values.detach().masked_fill(~mask, -torch.inf).max(), mask.sum())

    @classmethod
    def min(cls, values: Tensor, mask: Tensor) -> Metric:
        """The smallest over the True places of all parts' masks. values, mask: of one shape, not empty."""
        return cls(Reduction.min, values.detach().masked_fill(~mask, torch.inf).min(), mask.sum())

    @classmethod
    def same(cls, value: Tensor | float) -> Metric:
        """What every part finds alike, as the norm of a gradient that was reduced over all ranks."""
        return cls(Reduction.same, _detached(value))


def merge_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of disjoint rows of one update, as numbers.

    Raises ValueError for a value that does not say how it comes together, and where two parts say it
    differently or are not alike.
    """
    numbers = _as_numbers(parts)
    names = dict.fromkeys(name for part in numbers for name in part)
    return {name: _merged(name, [part[name] for part in numbers if name in part]) for name in names}


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Of one update, merged; without those of which nobody has anything to say."""
    return {
        name: float(metric.value / metric.count)
        if metric.reduction is Reduction.mean
        else float(metric.value)
        for name, metric in metrics.items()
        if metric.count != 0
    }


def over_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """The values of a step, of its updates' merged metrics. Every update weighs the same, whatever its
    rows."""
    reductions = {name: metric.reduction for update in updates for name, metric in update.items()}
    by_update = [values_of(update) for update in updates]
    step = {}

    # An update that lacks a metric does not count in its mean.
    for name, reduction in reductions.items():
        if found := [update[name] for update in by_update if name in update]:
            extreme = reduction in (Reduction.max, Reduction.min)
            step[name] = _extreme(reduction, found) if extreme else sum(found) / len(found)

    return step


def _merged(name: str, parts: Sequence[Metric]) -> Metric:
    """Of numbers."""
    reduction = parts[0].reduction
    count = sum(part.count for part in parts)

    if any(part.reduction is not reduction for part in parts):
        named = " and ".join(sorted({part.reduction.value for part in parts}))
        raise ValueError(f"metric {name!r} comes together as {named}: its parts must all say the same")

    # Parts that counted nothing are left out: their extreme is infinite.
    found = [float(part.value) for part in parts if part.count != 0]
    if reduction is Reduction.same and not all(_are_alike(value, found[0]) for value in found):
        raise ValueError(f"metric {name!r} must be the same everywhere, but its parts are {found}")
    if not found or reduction in (Reduction.sum, Reduction.mean):
        return Metric(reduction, sum(found), count)

    return Metric(reduction, found[0] if reduction is Reduction.same else _extreme(reduction, found), count)


def _are_alike(value: float, other: float) -> bool:
    """But for rounding, which is each rank's own."""
    return math.isclose(value, other, rel_tol=1e-6) or (math.isnan(value) and math.isnan(other))


def _extreme(reduction: Reduction, found: Sequence[float]) -> float:
    # max() and min() lose a NaN or keep it, depending on the order.
    if any(math.isnan(value) for value in found):
        return math.nan
    return max(found) if reduction is Reduction.max else min(found)


def _as_numbers(parts: Sequence[Mapping[str, Metric]]) -> list[dict[str, Metric]]:
    """What is on a device comes with one transfer."""
    for name, metric in ((name, metric) for part in parts for name, metric in part.items()):
        if not isinstance(metric, Metric):
            raise ValueError(
                f"metric {name!r} is a {type(metric).__name__}, which does not say how its parts come "
                f"together: "
                "give Metric.sum, .mean, .max, .min or .same (megarl/batch/metrics.py)"
            )

    # Fetch all scalars in one transfer, since each transfer waits for the device.
    scalars = [
        scalar for part in parts for metric in part.values() for scalar in (metric.value, metric.count)
    ]
    on_device = [scalar.detach().double() for scalar in scalars if isinstance(scalar, Tensor)]
    fetched = iter(torch.stack(on_device).tolist() if on_device else ())
    numbers = iter([next(fetched) if isinstance(scalar, Tensor) else scalar for scalar in scalars])

    # The numbers come in the order in which the scalars were listed.
    return [
        {name: Metric(metric.reduction, next(numbers), next(numbers)) for name, metric in part.items()}
        for part in parts
    ]


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value
