"""Policy losses per token: the clipped surrogate of PPO."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.masked import masked


class PolicyLoss(NamedTuple):
    """All (b, R), 0 (or False) in masked slots."""

    loss: Tensor
    clipped: Tensor  # bool: the clipped term is the larger one, so the token has no gradient
    dual_clipped: Tensor  # bool: the bound for negative advantages is in force
    log_ratio: Tensor  # new - old, before any cut


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> PolicyLoss:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(new - old) (Schulman et al. 2017, eq. 7).

    With `clip_dual` c > 1 the loss of a token with A < 0 is at most -c A (Ye et al. 2020, eq. 5). All tensors are (b, R).
    """
    log_ratio = masked(log_probs, mask) - masked(old_log_probs, mask)
    advantages = masked(advantages, mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    dual_clipped = torch.zeros_like(mask)
    if clip_dual is not None:
        ceiling = -clip_dual * advantages
        dual_clipped = (advantages < 0) & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    return PolicyLoss(loss, bounded > plain, dual_clipped, log_ratio)
