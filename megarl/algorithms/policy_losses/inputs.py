"""What a policy loss reads and gives."""

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
    """All (b, R), with 0 (or False) in masked slots. Make it with `of`, which sees to that."""

    log_probs: Tensor  # of the policy that is trained, with its graph
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    selected: Tensor  # bool: tokens that `PolicyLoss.prepare` has chosen; none without it

    @classmethod
    def of(
        cls,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> PolicyInputs:
        """old_log_probs None: they are those of now, so that every ratio is exactly 1 and has its
        gradient."""
        # With 0 in masked slots every ratio there is 1, and no NaN reaches a gradient.
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
        """new - old log-prob, before any cut."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """exp(log_ratio), finite also for a token that has collapsed; 1 in masked slots."""
        return exp_ratio(self.log_ratio)

    def row_mean(self, x: Tensor) -> Tensor:
        """(b, 1): the mean over a row's valid tokens of x, which is 0 in masked slots; 0 for a row without
        one."""
        return x.sum(dim=1, keepdim=True) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class TokenLosses(NamedTuple):
    """All (b, R). What stands in masked slots is not read."""

    loss: Tensor
    bounded: Tensor  # bool: the loss's own limit is in force; each loss says which
    # bool: the limit for negative advantages is in force, where there is one
    dual_clipped: Tensor | None = None


Prepare = Callable[[Mapping[str, Column], Column, PolicyLossConfig, int], dict[str, Column]]


@dataclass(frozen=True)
class PolicyLoss:
    """One kind of policy loss.

    per_token: a micro-batch's inputs -> the loss of each token. It reads nothing beyond a row, so that it
    does not matter how the rows were cut.
    prepare: for a kind that has to see the whole mini-batch. `prepare(columns, mask, config, seed)` is called
    before the mini-batch is cut, with its columns by batch key (it reads `old_log_probs` and `advantages`)
    and its response mask, all (B, R) as tensors or all as rows of tokens, and a seed for what is drawn; it
    returns columns to add to the batch, which ActorLoss reads: `selected_tokens`, bool.
    """

    per_token: Callable[[PolicyInputs, PolicyLossConfig], TokenLosses]
    prepare: Prepare | None = None
