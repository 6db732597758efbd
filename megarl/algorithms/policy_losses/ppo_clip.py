"""PPO's clipped surrogate."""

from __future__ import annotations

import torch

from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses
from megarl.config.schema import PolicyLossConfig


def ppo_clip(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(new - old) (Schulman et al. 2017, eq. 7; with two
    bounds DAPO, Yu et al. 2025, arXiv 2503.14476).

    With `clip_dual` c > 1 the loss of a token with A < 0 is at most -c A (Ye et al. 2020, eq. 5).
    bounded: the clipped term is the larger one, so the token has no gradient.
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    loss, bounded = torch.maximum(plain, clipped), clipped > plain
    if config.clip_dual is None:
        return TokenLosses(loss, bounded)
    ceiling = -config.clip_dual * advantages
    dual_clipped = (advantages < 0) & (loss > ceiling)
    return TokenLosses(torch.where(dual_clipped, ceiling, loss), bounded, dual_clipped)
