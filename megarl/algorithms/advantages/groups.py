"""Reductions over the samples of each prompt, without a loop over prompts or samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The rows of a batch by their uid; groups may have any sizes and their rows may stand anywhere.

    Rows that do not count (those without a response token) are a group of their own, so that no other is compared with them.
    """

    index: Tensor  # (B,) int64: the number of the row's group
    sizes: Tensor  # (num_groups,) int64

    @classmethod
    def of(cls, uid: np.ndarray, counts: Tensor) -> Groups:
        """uid (B,); counts (B,) bool, on the device where the reductions will be."""
        names, inverse = np.unique(uid.astype(str), return_inverse=True)
        index = torch.where(counts, torch.from_numpy(inverse).to(counts.device), len(names))
        return cls(index, torch.bincount(index))

    @property
    def size(self) -> Tensor:
        """(B,): samples in the row's group, itself included."""
        return self.sizes[self.index]

    def blocks(self, num_rows: int) -> Iterator[Tensor]:
        """Row numbers (b,), sorted by group, in blocks of whole groups: of `num_rows` rows, or of so many more as end a group."""
        order, ends = torch.argsort(self.index, stable=True), self.sizes.cumsum(0)
        targets = torch.arange(num_rows, len(order) + num_rows, num_rows, device=ends.device).clamp(max=len(order))
        cuts = ends[torch.searchsorted(ends, targets)].unique_consecutive().tolist()
        return (order[start:end] for start, end in pairwise([0, *cuts]))

    def sum(self, x: Tensor) -> Tensor:
        """(B,): the sum of x (B,) over the row's group."""
        return x.new_zeros(len(self.sizes)).index_add_(0, self.index, x)[self.index]

    def mean(self, x: Tensor) -> Tensor:
        """(B,): the mean of the row's group."""
        return self.sum(x) / self.size.to(x.dtype)

    def deviation(self, x: Tensor) -> Tensor:
        """(B,): x minus the group's mean; exactly 0 where all samples of the group are the same, whatever rounding does."""
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
