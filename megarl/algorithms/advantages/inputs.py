"""What advantage estimators read and give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.groups import Groups
from megarl.algorithms.masked import masked_row_sums, row_blocks, row_lengths
from megarl.algorithms.scores import refuse_unusable
from megarl.config.schema import AdvantageConfig


class Advantages(NamedTuple):
    advantages: Tensor  # (B, R)
    returns: Tensor  # (B, R), what the critic learns


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may read; None is what the run does not make.

    Raises ValueError where a sample's rewards have no finite sum, with its uid: a NaN or an infinity among them.
    """

    token_level_rewards: Tensor  # (B, R)
    response_mask: Tensor  # (B, R) bool
    uid: np.ndarray  # (B,); samples of one prompt share it
    values: Tensor | None = None  # (B, R), the critic's
    baseline_scores: Tensor | None = None  # (B,): score of the greedy response to the row's prompt
    score_parts: Tensor | None = None  # (B, K): of each reward function, before its weight
    score_weights: Tensor | None = None  # (K,) of the reward functions; None: all 1
    old_log_probs: Tensor | None = None  # (B, R)
    sum_pi_squared: Tensor | None = None  # (B, R): at each token, the sum over the vocabulary of the squared probabilities

    def __post_init__(self) -> None:
        refuse_unusable("the sum of token_level_rewards", self.outcomes, self.uid)

    @cached_property
    def outcomes(self) -> Tensor:
        """(B,): the sum of a row's rewards over its valid tokens."""
        return masked_row_sums(self.token_level_rewards, self.response_mask)

    @cached_property
    def lengths(self) -> Tensor:
        """(B,): valid tokens of each row, in the rewards' dtype."""
        return row_lengths(self.response_mask).to(self.token_level_rewards.dtype)

    @cached_property
    def groups(self) -> Groups:
        """By prompt, of the rows that have a valid token."""
        return Groups.of(self.uid, self.lengths > 0)

    def on_every_token(self, per_row: Tensor) -> Advantages:
        """The same advantage (B,) for each valid token of a row, and 0 elsewhere. There is no critic: returns are the advantages."""
        mask, zero = self.response_mask, torch.zeros((), dtype=per_row.dtype, device=per_row.device)
        advantages = torch.empty(mask.shape, dtype=per_row.dtype, device=per_row.device)
        for rows in row_blocks(advantages):
            torch.where(mask[rows], per_row[rows, None], zero, out=advantages[rows])
        return Advantages(advantages, advantages)


def needed(value: Tensor | None, estimator: str, name: str, remedy: str) -> Tensor:
    """`value`, or a ValueError that says what the estimator misses."""
    if value is None:
        raise ValueError(f"algorithm.advantage.estimator={estimator} needs {name}, and the batch has none; {remedy}")
    return value


Estimator = Callable[[AdvantageInputs, AdvantageConfig], Advantages]
