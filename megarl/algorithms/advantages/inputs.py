"""Inputs and outputs of advantage estimators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megarl.algorithms.groups import Groups, refuse_unusable
from megarl.algorithms.masked import masked_row_sums, on_every_token, row_lengths
from megarl.batch.ragged import Column, RaggedTensor
from megarl.config.schema import AdvantageConfig


class Advantages(NamedTuple):
    """The result of an estimator."""

    advantages: Column  # (B, R)
    returns: Column  # (B, R), the targets of the critic


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The inputs of an estimator. Inputs that the run does not produce are None.

    Columns (B, R) are either all tensors, as a user function receives them, or all rows of tokens.

    Raises:
        ValueError: The rewards of a sample have no finite sum, because one is NaN or infinite; the message
            contains its uid.
    """

    token_level_rewards: Column  # (B, R)
    response_mask: Column  # (B, R) bool
    uid: np.ndarray  # (B,); samples of one prompt share it
    values: Column | None = None  # (B, R), from the critic
    baseline_scores: Tensor | None = None  # (B,): score of the greedy response to the row's prompt
    score_parts: Tensor | None = None  # (B, K): score of each reward function, before its weight
    score_weights: Tensor | None = None  # (K,), weights of the reward functions; None: all 1
    old_log_probs: Column | None = None  # (B, R)
    # (B, R): the sum of the squared probabilities over the vocabulary, at each token
    sum_pi_squared: Column | None = None
    teacher_log_prob: Column | None = None  # (B, R)

    def __post_init__(self) -> None:
        refuse_unusable("the sum of token_level_rewards", self.outcomes, self.uid)

    @cached_property
    def outcomes(self) -> Tensor:
        """The sum of each row's rewards over its valid tokens, (B,)."""
        return masked_row_sums(self.token_level_rewards, self.response_mask)

    @cached_property
    def lengths(self) -> Tensor:
        """The number of valid tokens of each row, (B,), in the dtype of the rewards."""
        return row_lengths(self.response_mask).to(self.token_level_rewards.dtype)

    @cached_property
    def groups(self) -> Groups:
        """The rows with a valid token, grouped by prompt."""
        return Groups.of(self.uid, self.lengths > 0)

    def on_every_token(self, per_row: Tensor) -> Advantages:
        """Assign the advantage of each row (B,) to its valid tokens, and 0 elsewhere.

        Without a critic, the returns are the advantages.
        """
        advantages = on_every_token(per_row, self.response_mask)
        return Advantages(advantages, advantages)

    def padded(self) -> AdvantageInputs:
        """Return the inputs with padded tensors (B, R) instead of ragged rows."""
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        dense: dict[str, Any] = {
            name: column.padded() for name, column in columns.items() if isinstance(column, RaggedTensor)
        }
        return replace(self, **dense)


def needed[Input: Column](value: Input | None, estimator: str, name: str, hint: str) -> Input:
    """Return `value`, or raise a ValueError that names the input that the estimator needs."""
    if value is None:
        raise ValueError(
            f"algorithm.advantage.estimator={estimator} needs {name}, and the batch has none; {hint}"
        )
    return value


Estimator = Callable[[AdvantageInputs, AdvantageConfig], Advantages]
