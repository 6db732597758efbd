"""The samples of each prompt: reductions over them without a loop over prompts or samples, and whether they
differ."""

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
    """The rows of a batch by their uid; groups may have any sizes and their rows may stand anywhere.

    Rows that do not count (those without a response token) are a group of their own, so that no other is
    compared with them.
    """

    index: Tensor  # (B,) int64: the number of the row's group
    sizes: Tensor  # (num_groups,) int64

    @classmethod
    def of(cls, uid: np.ndarray, counts: Tensor) -> Groups:
        """uid (B,); counts (B,) bool, on the device where the reductions will be."""
        names, inverse = np.unique(uid.astype(str), return_inverse=True)
        # Rows that do not count get the number after the last group.
        index = torch.where(counts, torch.from_numpy(inverse).to(counts.device), len(names))
        return cls(index, torch.bincount(index))

    @property
    def size(self) -> Tensor:
        """(B,): samples in the row's group, itself included."""
        return self.sizes[self.index]

    def blocks(self, num_rows: int) -> Iterator[Tensor]:
        """Row numbers (b,), sorted by group, in blocks of whole groups: of `num_rows` rows, or of so many
        more as end a group."""
        # A stable sort keeps the rows of a group in the order of the batch.
        order = torch.argsort(self.index, stable=True)
        ends = self.sizes.cumsum(0)
        # Cut where the first group ends at or after each multiple of num_rows.
        targets = torch.arange(num_rows, len(order) + num_rows, num_rows, device=ends.device).clamp(
            max=len(order)
        )
        cuts = ends[torch.searchsorted(ends, targets)].unique_consecutive().tolist()

        return (order[start:end] for start, end in pairwise([0, *cuts]))

    def sum(self, x: Tensor) -> Tensor:
        """(B,): the sum of x (B,) over the row's group."""
        return x.new_zeros(len(self.sizes)).index_add_(0, self.index, x)[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """(B,): the mean of the row's group."""
        return self.sum(x) / self.size.to(x.dtype)

    def deviation(self, x: Tensor) -> Tensor:
        """(B,): x minus the group's mean; exactly 0 where all samples of the group are the same, whatever
        rounding does."""
        return torch.where(self.spread(x) > 0, x - self.mean(x), 0.0)

    def standard_deviation(self, x: Tensor) -> Tensor:
        """(B,): the unbiased one (divided by size - 1) of the row's group; 0 for a group of one."""
        return (self.sum(self.deviation(x).square()) / (self.size - 1).clamp(min=1).to(x.dtype)).sqrt()

    def maximum(self, x: Tensor) -> Tensor:
        """(B,): the largest x of the row's group."""
        largest = x.new_full((len(self.sizes),), -torch.inf)
        return largest.scatter_reduce_(0, self.index, x, "amax")[self.index]

    def spread(self, x: Tensor) -> Tensor:
        """(B,): the largest x of the row's group minus the smallest."""
        return self.maximum(x) + self.maximum(-x)


def rows_with_signal(scores: Tensor, uid: np.ndarray, is_scored: Tensor | None = None) -> Tensor:
    """Return (B,) bool: whether the scores (B,) of the samples with the row's uid (B,) differ (Yu et al.
    2025, arXiv 2503.14476, section 3.2).

    A group without signal has advantages of 0 under every estimator that compares a prompt's samples. A group
    of one has none.

    Args:
        scores: (B,) float.
        uid: (B,), of the prompt.
        is_scored: (B,) bool, False for samples whose scoring failed: their score of 0 is compared with no
            other. None: all are scored.

    Raises:
        ValueError: A score is NaN or infinite; the message has its uid.
    """
    groups = _groups_of(scores, uid)
    if is_scored is None:
        return groups.spread(scores) > 0
    # Samples that were not scored never are the maximum or the minimum.
    largest, smallest = (torch.where(is_scored, sign * scores, -torch.inf) for sign in (1, -1))

    return groups.maximum(largest) + groups.maximum(smallest) > 0


def group_metrics(scores: Tensor, uid: np.ndarray, is_scored: Tensor | None = None) -> dict[str, float]:
    """Return the shares of prompts whose samples have the same score, without samples whose scoring failed
    (see rows_with_signal).

    `groups/without_signal`: all samples have the same score; `groups/at_best`, `groups/at_worst`: all have
    the batch's largest, or smallest, score (where those differ). Nothing for an empty batch.
    """
    if is_scored is not None:
        scores = scores[is_scored]
        uid = uid[is_scored.numpy()]

    if len(scores) == 0:
        return {}
    groups = _groups_of(scores, uid)
    weight = 1.0 / groups.size  # a prompt counts once, whatever the number of its samples
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
