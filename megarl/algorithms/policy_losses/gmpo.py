"""GMPO: the geometric mean of the tokens' ratios, each clipped."""

from __future__ import annotations

import torch

from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses, exp_ratio
from megarl.config.schema import PolicyLossConfig


def gmpo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """-A exp(mean over the response's tokens of the clipped log-ratio) on each of its tokens (Zhao et al. 2025, arXiv 2507.20673),
    so that the aggregation sequence_mean_token_mean gives the paper's loss.

    The log-ratio is at most clip_high where A > 0 and at least -clip_low where A < 0 (the paper: 0.4 both ways). A is the response's:
    the mean of its tokens' advantages. bounded: the token's log-ratio is cut, so it adds no gradient.
    """
    advantage = inputs.row_mean(inputs.advantages)
    log_ratio = inputs.log_ratio
    cut = torch.where(advantage > 0, log_ratio.clamp(max=config.clip_high), log_ratio.clamp(min=-config.clip_low))
    loss = -advantage * exp_ratio(inputs.row_mean(cut))
    return TokenLosses(loss.expand_as(log_ratio), cut != log_ratio)
