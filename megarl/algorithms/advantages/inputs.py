"""What advantage estimators read and give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from torch import Tensor

from megarl.algorithms.groups import Groups
from megarl.algorithms.masked import masked_row_sums, on_every_token, row_lengths
from megarl.algorithms.scores import refuse_unusable
from megarl.batch.ragged import Column, RaggedTensor
from megarl.config.schema import AdvantageConfig


class Advantages(NamedTuple):
    advantages: Column  # (B, R)
    returns: Column  # (B, R), what the critic learns


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may read; None is what the run does not make. What is (B, R) is so as tensors, as a
    function of the user gets it, or all of it as rows of tokens.

    Raises ValueError where a sample's rewards have no finite sum, with its uid: a NaN or an infinity among
    them.
    """

    token_level_rewards: Column  # (B, R)
    response_mask: Column  # (B, R) bool
    uid: np.ndarray  # (B,); samples of one prompt share it
    values: Column | None = None  # (B, R), the critic's
    baseline_scores: Tensor | None = None  # (B,): score of the greedy response to the row's prompt
    score_parts: Tensor | None = None  # (B, K): of each reward function, before its weight
    score_weights: Tensor | None = None  # (K,) of the reward functions; None: all 1
    old_log_probs: Column | None = None  # (B, R)
    # (B, R): at each token, the sum over the vocabulary of the squared probabilities
    sum_pi_squared: Column | None = None

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
        """The same advantage (B,) for each valid token of a row, and 0 elsewhere. There is no critic: returns
        are the advantages."""
        advantages = on_every_token(per_row, self.response_mask)
        return Advantages(advantages, advantages)

    def padded(self) -> AdvantageInputs:
        """With tensors (B, R) in place of rows of tokens."""
        columns: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        dense: dict[str, Any] = {
            name: column.padded() for name, column in columns.items() if isinstance(column, RaggedTensor)
        }
        return replace(self, **dense)


@overload
def needed(value: Tensor | None, estimator: str, name: str, hint: str) -> Tensor: ...
@overload
def needed(value: Column | None, estimator: str, name: str, hint: str) -> Column: ...
def needed(value: Column | None, estimator: str, name: str, hint: str) -> Column:
    """`value`, or a ValueError that says what the estimator misses."""
    if value is None:
        raise ValueError(
            f"algorithm.advantage.estimator={estimator} needs {name}, and the batch has none; {hint}"
        )
    return value


Estimator = Callable[[AdvantageInputs, AdvantageConfig], Advantages]
