"""Inputs and outputs of policy losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.masked import masked
from megarl.batch.ragged import Column
from megarl.config.schema import PolicyLossConfig


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """The inputs of a policy loss, all (b, R), with 0 (or False) in masked slots.

    Use `of` to create it, which ensures this.
    """

    log_probs: Tensor  # of the trained policy, with the autograd graph
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    selected: Tensor  # bool: tokens selected by `PolicyLoss.prepare`; all False without it

    @classmethod
    def of(
        cls,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> PolicyInputs:
        """Mask the inputs.

        Args:
            old_log_probs: None: use the current log-probs, so that every ratio is exactly 1 but has a
                gradient.
        """
        # Masked slots are 0, so every ratio there is 1 and no NaN reaches a gradient.
        log_probs = masked(log_probs, mask)
        return cls(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old_log_probs is None else masked(old_log_probs, mask),
            advantages=masked(advantages, mask),
            mask=mask,
            selected=torch.zeros_like(mask) if selected is None else selected & mask,
        )

    @property
    def log_ratio(self) -> Tensor:
        """Difference of the new and the old log-prob, not clamped."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """exp(log_ratio), clamped to stay finite even if a probability collapses; 1 in masked slots."""
        return exp_ratio(self.log_ratio)

    def row_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over each row's valid tokens, (b, 1).

        x must be 0 in masked slots. The mean is 0 for a row without valid tokens.
        """
        return x.sum(dim=1, keepdim=True) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class TokenLosses(NamedTuple):
    """The loss of each token, all (b, R). Masked slots are ignored."""

    loss: Tensor
    bounded: Tensor  # bool: the loss's own limit is active; each loss defines it
    # bool: the limit for negative advantages is active, for losses that have one
    dual_clipped: Tensor | None = None


Prepare = Callable[[Mapping[str, Column], Column, PolicyLossConfig, int], dict[str, Column]]


@dataclass(frozen=True)
class PolicyLoss:
    """One kind of policy loss.

    Attributes:
        per_token: Maps the inputs of a micro-batch to the loss of each token. It must not mix rows, so that
            the split into micro-batches does not matter.
        prepare: For kinds that need the whole mini-batch. `prepare(columns, mask, config, seed)` is called
            before the mini-batch is split, with its columns by batch key (it reads `old_log_probs` and
            `advantages`) and its response mask, either all (B, R) tensors or all rows of tokens, and a seed
            for random draws. It returns columns to add to the batch, which ActorLoss reads:
            `selected_tokens`, bool.
    """

    per_token: Callable[[PolicyInputs, PolicyLossConfig], TokenLosses]
    prepare: Prepare | None = None
