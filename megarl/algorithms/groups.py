"""Outcome scores of samples, and groups of samples that share a prompt.

The module places scores on the last generated token, checks that they are finite, and adds the overlong
penalty. It has vectorized reductions over groups, and determines which groups carry a learning signal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import (
    as_rows,
    leaves_nothing_out,
    map_tokens,
    of_form,
    row_lengths,
    token_blocks,
)
from megarl.batch.ragged import Column, RaggedTensor
from megarl.config.schema import OverlongConfig


def place_scores(scores: Sequence[float] | Tensor, response_mask: Column) -> Column:
    """Place scores (B,) on the last valid token of each row of response_mask (B, R), with 0 elsewhere.

    Returns:
        `token_level_scores`, (B, R) float32.

    Raises:
        ValueError: A row has no response token, and so no position for its score.
    """
    empty = (row_lengths(response_mask) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"rows {empty[:8]} of {len(response_mask)} have no response token to place their scores on; a "
            f"response contains at least its end token: check that the rollout returned one for every prompt"
        )

    per_row = torch.as_tensor(scores, dtype=torch.float32)
    rows = as_rows(response_mask)
    # If there are no gaps, a row's last valid token is its last token.
    last = rows.lengths.cumsum(0) - 1

    # If there are gaps, the last valid token of a row may come earlier.
    if not leaves_nothing_out(rows):
        for block in token_blocks(rows):
            assert block.mask is not None
            valid = block.mask.nonzero().flatten() + block.tokens.start
            last[block.rows] = valid[torch.searchsorted(valid, last[block.rows], right=True) - 1]

    values = torch.zeros(rows.num_tokens)  # only pages that are written take memory
    values[last] = per_row
    return of_form(RaggedTensor.packed_rows(values, rows.lengths), response_mask)


def refuse_unusable(name: str, per_row: Tensor, uid: np.ndarray) -> None:
    """Refuse values of `per_row` (B,) that are NaN or infinite.

    Raises:
        ValueError: Contains the uids (B,) of the first such samples.
    """
    rows = (~torch.isfinite(per_row)).nonzero().flatten().tolist()
    if rows:
        shown = ", ".join([*(str(uid[row]) for row in rows[:8]), *(["..."] if len(rows) > 8 else [])])
        raise ValueError(
            f"{name} is {float(per_row[rows[0]])} for {len(rows)} of {len(per_row)} samples (uid {shown}); "
            "each would make every advantage of its group or batch useless: fix the reward function"
        )


def overlong_penalty(lengths: Tensor, max_response_length: int, config: OverlongConfig) -> Tensor:
    """Return DAPO's soft overlong penalty (Yu et al. 2025, arXiv 2503.14476, eq. 13).

    The penalty (B,) of lengths (B,) in tokens is at most 0.

    The penalty is 0 up to max_response_length - buffer_tokens, then decreases linearly to -penalty at
    max_response_length. Without a buffer it is 0 everywhere.
    """
    buffer_tokens = config.buffer_tokens(max_response_length)
    if buffer_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32, device=lengths.device)
    excess = lengths.float() - (max_response_length - buffer_tokens)

    return -config.penalty * (excess / buffer_tokens).clamp(0.0, 1.0)


def penalise_overlong(
    token_level_scores: Column, mask: Column, max_response_length: int, config: OverlongConfig
) -> tuple[Column, dict[str, float]]:
    """Add the overlong penalty to the scores (B, R), on each row's last valid token, and return its metrics.

    The length of a response counts the tokens that the model generated.

    Metrics: `reward/overlong_penalty`, the mean over rows, at most 0; `reward/overlong_fraction`, the
    fraction of rows with a penalty.

    Raises:
        ValueError: A row has no response token, see place_scores.
    """
    penalty = overlong_penalty(row_lengths(mask), max_response_length, config)
    metrics = {
        "reward/overlong_penalty": float(penalty.mean()),
        "reward/overlong_fraction": float((penalty < 0).float().mean()),
    }
    return map_tokens(torch.add, mask, token_level_scores, place_scores(penalty, mask)), metrics


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
