"""Reduction of distributed metrics.

Each metric defines its own reduction, so that engine, workers and roles agree without knowing the metric.

A loss returns the parts of a micro-batch. The parts of one update come from disjoint rows; they are merged
over the micro-batches of a replica, then over replicas. The values of a step are taken over its updates:

    reduction   parts of one update                  updates of a step
    sum         sum                                  mean
    mean        sum of totals / sum of counts        mean
    max, min    extreme                              extreme
    same        equal in all, or ValueError          mean

A part with count 0, or without the metric, is ignored; a metric without any other part is not reported for
the step. A NaN is always propagated. A mean whose denominator is known before the rows are split
(MiniBatchCounts) is a sum of shares.
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
    """A part of a metric, made of scalars.

    Attributes:
        value: The value, or for a mean the total.
        count: The number of elements in the value.
    """

    reduction: Reduction
    value: Tensor | float
    count: Tensor | float = 1.0

    @classmethod
    def sum(cls, value: Tensor | float) -> Metric:
        """Create a part of a sum: a count, or a value already divided by a count of the whole mini-batch."""
        return cls(Reduction.sum, _detached(value))

    @classmethod
    def mean(cls, values: Tensor, mask: Tensor) -> Metric:
        """Create a part of the mean over the True elements of all parts' masks, with equal weights.

        `values` and `mask` have the same shape.
        """
        return cls(Reduction.mean, torch.where(mask, values.detach(), 0.0).sum(), mask.sum())

    @classmethod
    def ratio(cls, total: float, count: float) -> Metric:
        """Create a part of the ratio of the sum of totals to the sum of counts over all parts."""
        return cls(Reduction.mean, total, count)

    @classmethod
    def max(cls, values: Tensor, mask: Tensor) -> Metric:
        """Create a part of the maximum over the True elements of all parts' masks.

        `values` and `mask` have the same shape and are not empty.
        """
        return cls(Reduction.max, values.detach().masked_fill(~mask, -torch.inf).max(), mask.sum())

    @classmethod
    def min(cls, values: Tensor, mask: Tensor) -> Metric:
        """Create a part of the minimum over the True elements of all parts' masks.

        `values` and `mask` have the same shape and are not empty.
        """
        return cls(Reduction.min, values.detach().masked_fill(~mask, torch.inf).min(), mask.sum())

    @classmethod
    def same(cls, value: Tensor | float) -> Metric:
        """Create a value that is equal in every part, such as a gradient norm reduced over all ranks."""
        return cls(Reduction.same, _detached(value))


def merge_metrics(parts: Sequence[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of disjoint rows of one update and convert them to numbers.

    Raises:
        ValueError: A value is not a Metric, two parts of a metric have different reductions, or the parts of
            a `same` metric differ.
    """
    numbers = _as_numbers(parts)
    names = dict.fromkeys(name for part in numbers for name in part)
    return {name: _merged(name, [part[name] for part in numbers if name in part]) for name in names}


def values_of(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the values of the merged metrics of one update, without metrics whose count is 0."""
    return {
        name: float(metric.value / metric.count)
        if metric.reduction is Reduction.mean
        else float(metric.value)
        for name, metric in metrics.items()
        if metric.count != 0
    }


def over_updates(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """Return the values of a step from the merged metrics of its updates.

    All updates have the same weight, whatever their number of rows.
    """
    reductions = {name: metric.reduction for update in updates for name, metric in update.items()}
    by_update = [values_of(update) for update in updates]
    step = {}

    # An update without a metric does not count in the metric's mean.
    for name, reduction in reductions.items():
        if found := [update[name] for update in by_update if name in update]:
            extreme = reduction in (Reduction.max, Reduction.min)
            step[name] = _extreme(reduction, found) if extreme else sum(found) / len(found)

    return step


def _merged(name: str, parts: Sequence[Metric]) -> Metric:
    """Merge parts that have been converted to numbers."""
    reduction = parts[0].reduction
    count = sum(part.count for part in parts)

    if any(part.reduction is not reduction for part in parts):
        named = " and ".join(sorted({part.reduction.value for part in parts}))
        raise ValueError(f"metric {name!r} has the reductions {named}: all its parts must have the same one")

    # Skip parts with count 0: their extreme is infinite.
    found = [float(part.value) for part in parts if part.count != 0]
    if reduction is Reduction.same and not all(_are_alike(value, found[0]) for value in found):
        raise ValueError(f"metric {name!r} must be equal in all parts, but they are {found}")
    if not found or reduction in (Reduction.sum, Reduction.mean):
        return Metric(reduction, sum(found), count)

    return Metric(reduction, found[0] if reduction is Reduction.same else _extreme(reduction, found), count)


def _are_alike(value: float, other: float) -> bool:
    """Return whether two values are equal except for rounding, which may differ between ranks."""
    return math.isclose(value, other, rel_tol=1e-6) or (math.isnan(value) and math.isnan(other))


def _extreme(reduction: Reduction, found: Sequence[float]) -> float:
    # max() and min() drop or keep a NaN depending on the order.
    if any(math.isnan(value) for value in found):
        return math.nan
    return max(found) if reduction is Reduction.max else min(found)


def _as_numbers(parts: Sequence[Mapping[str, Metric]]) -> list[dict[str, Metric]]:
    """Convert values to numbers, with a single transfer for all tensors on a device."""
    for name, metric in ((name, metric) for part in parts for name, metric in part.items()):
        if not isinstance(metric, Metric):
            raise ValueError(
                f"metric {name!r} is a {type(metric).__name__}, which does not define how its parts are "
                "combined: return Metric.sum, .mean, .max, .min or .same (megarl/batch/metrics.py)"
            )

    # Fetch all scalars in one transfer, because each transfer synchronizes with the device.
    scalars = [
        scalar for part in parts for metric in part.values() for scalar in (metric.value, metric.count)
    ]
    on_device = [scalar.detach().double() for scalar in scalars if isinstance(scalar, Tensor)]
    fetched = iter(torch.stack(on_device).tolist() if on_device else ())
    numbers = iter([next(fetched) if isinstance(scalar, Tensor) else scalar for scalar in scalars])

    # The numbers are in the order in which the scalars were listed.
    return [
        {name: Metric(metric.reduction, next(numbers), next(numbers)) for name, metric in part.items()}
        for part in parts
    ]


def _detached(value: Tensor | float) -> Tensor | float:
    return value.detach() if isinstance(value, Tensor) else value
