"""GSPO: one ratio for a whole response."""

from __future__ import annotations

import torch

from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses, exp_ratio
from megarl.config.schema import PolicyLossConfig


def gspo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """PPO's surrogate with s = exp(mean over the response's tokens of new - old) in place of each token's ratio (Zheng et al. 2025,
    arXiv 2507.18071, eqs. 5 to 7). It goes with the aggregation sequence_mean_token_mean, under which a row's loss is the paper's.

    In the form of eqs. 13 and 14 (GSPO-token), s_t = sg[s] exp(new_t - sg[new_t]): of the same value and, where a row's advantages
    are equal, of the same gradient, and right where they are not. bounded: the response's ratio is clipped, so it has no gradient.
    """
    response = exp_ratio(inputs.row_mean(inputs.log_ratio.detach()))
    ratio = response * (inputs.log_probs - inputs.log_probs.detach()).exp()
    plain = -ratio * inputs.advantages
    clipped = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * inputs.advantages
    return TokenLosses(torch.maximum(plain, clipped), clipped > plain)
