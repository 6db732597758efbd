"""CISPO: REINFORCE with a clipped importance weight, so that no token loses its gradient."""

from __future__ import annotations

from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses
from megarl.config.schema import PolicyLossConfig


def cispo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p (MiniMax 2025, arXiv 2506.13585; sg: without gradient).

    The paper has no lower bound: a clip_low near 1 comes to that. bounded: the weight is clipped.
    """
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return TokenLosses(-weight * inputs.advantages * inputs.log_probs, weight != ratio)
