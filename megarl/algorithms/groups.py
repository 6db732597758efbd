"""Groups of samples that share a prompt.

The module has vectorized reductions over groups, and determines which groups carry a learning signal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.scores import refuse_unusable


@dataclass(frozen=True)
class Groups:
    """The rows of a batch grouped by uid. Groups may differ in size, and their rows need not be adjacent.

    Rows that do not count, because they have no response token, form a separate group, so that no other row
    is compared with them.
    """

    index: Tensor  # (B,) int64: the group number of each row
    sizes: Tensor  # (num_groups,) int64

    @classmethod
    def of(cls, uid: np.ndarray, counts: Tensor) -> Groups:
        """Group the rows by `uid` (B,).

        Args:
            uid: (B,).
            counts: (B,) bool, whether a row counts, on the device of the reductions.
        """
        names, inverse = np.unique(uid.astype(str), return_inverse=True)
        # Rows that do not count get the number after the last group.
        index = torch.where(counts, torch.from_numpy(inverse).to(counts.device), len(names))
        return cls(index, torch.bincount(index))

    @property
    def size(self) -> Tensor:
        """The number of samples in each row's group, including the row itself, (B,)."""
        return self.sizes[self.index]

    def blocks(self, num_rows: int) -> Iterator[Tensor]:
        """Yield the row numbers (b,), sorted by group, in blocks of whole groups.

        A block has `num_rows` rows, or as many more as complete its last group.
        """
        # A stable sort keeps the rows of a group in the order of the batch.
        order = torch.argsort(self.index, stable=True)
        ends = self.sizes.cumsum(0)
        # End each block with the first group that ends at or after a multiple of num_rows.
        targets = torch.arange(num_rows, len(order) + num_rows, num_rows, device=ends.device).clamp(
            max=len(order)
        )
        cuts = ends[torch.searchsorted(ends, targets)].unique_consecutive().tolist()

        return (order[start:end] for start, end in pairwise([0, *cuts]))

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x (B,) over each row's group, (B,)."""
        return x.new_zeros(len(self.sizes)).index_add_(0, self.index, x)[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x (B,) over each row's group, (B,)."""
        return self.sum(x) / self.size.to(x.dtype)

    def deviation(self, x: Tensor) -> Tensor:
        """Return x (B,) minus its group's mean, (B,).

        The result is exactly 0 in groups with identical values, independent of rounding.
        """
        return torch.where(self.spread(x) > 0, x - self.mean(x), 0.0)

    def standard_deviation(self, x: Tensor) -> Tensor:
        """Return the unbiased standard deviation (divisor size - 1) of each row's group, (B,).

        It is 0 for groups of size 1.
        """
        return (self.sum(self.deviation(x).square()) / (self.size - 1).clamp(min=1).to(x.dtype)).sqrt()

    def maximum(self, x: Tensor) -> Tensor:
        """Return the largest x (B,) of each row's group, (B,)."""
        largest = x.new_full((len(self.sizes),), -torch.inf)
        return largest.scatter_reduce_(0, self.index, x, "amax")[self.index]

    def spread(self, x: Tensor) -> Tensor:
        """Return the largest minus the smallest x (B,) of each row's group, (B,)."""
        return self.maximum(x) + self.maximum(-x)


def rows_with_signal(scores: Tensor, uid: np.ndarray) -> Tensor:
    """Return whether the scores of the samples of each row's prompt differ, (B,) bool.

    This is the filter of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2).

    All group-relative estimators assign zero advantage to groups without such a signal, and a group of size 1
    never has one.

    Args:
        scores: (B,) float.
        uid: (B,), the uid of each row's prompt.

    Raises:
        ValueError: A score is NaN or infinite; the message contains its uid.
    """
    return _groups_of(scores, uid).spread(scores) > 0


def group_metrics(scores: Tensor, uid: np.ndarray, is_scored: Tensor | None = None) -> dict[str, float]:
    """Return the fractions of prompts whose samples all have the same score.

    Samples whose scoring failed (`is_scored` is False) are excluded.

    - `groups/without_signal`: all samples of the prompt have the same score.
    - `groups/at_best`, `groups/at_worst`: all samples have the largest, or smallest, score of the batch. Both
      are 0 if all scores of the batch are equal.

    An empty batch has no metrics.
    """
    if is_scored is not None:
        scores = scores[is_scored]
        uid = uid[is_scored.numpy()]

    if len(scores) == 0:
        return {}
    groups = _groups_of(scores, uid)
    weight = 1.0 / groups.size  # each prompt counts once, whatever its number of samples
    flat = groups.spread(scores) == 0
    # If all scores are equal, no prompt is at the best or at the worst.
    differ = scores.max() > scores.min()
    shares = {
        "without_signal": flat,
        "at_best": flat & (scores == scores.max()) & differ,
        "at_worst": flat & (scores == scores.min()) & differ,
    }

    return {
        f"groups/{name}": float((weight * rows).sum() / len(groups.sizes)) for name, rows in shares.items()
    }


def _groups_of(scores: Tensor, uid: np.ndarray) -> Groups:
    refuse_unusable("the score", scores, uid)
    return Groups.of(uid, torch.ones_like(scores, dtype=torch.bool))
