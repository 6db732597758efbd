"""DPPO: tokens stop at a distance between distributions, instead of at a ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses
from megarl.config.schema import PolicyLossConfig


def dppo_tv(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """With the total variation |p_new - p_old| of the sampled token against all others as the distance; see `_dppo`."""
    distance = (inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()).abs()
    return _dppo(inputs, config, distance)


def dppo_kl(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """With KL(old || new) of the two-way distribution "the sampled token or another" as the distance; see `_dppo`."""
    new, old = inputs.log_probs.detach(), inputs.old_log_probs
    others = _log_of_others(old)
    distance = old.exp() * (old - new) + others.exp() * (others - _log_of_others(new))
    return _dppo(inputs, config, distance)


def _log_of_others(log_probs: Tensor) -> Tensor:
    """log(1 - p), finite also for p = 1."""
    rest = -torch.expm1(log_probs)
    return rest.clamp(min=torch.finfo(log_probs.dtype).tiny).log()


def _dppo(inputs: PolicyInputs, config: PolicyLossConfig, distance: Tensor) -> TokenLosses:
    """-M ratio A (Qi et al. 2026, arXiv 2602.04879). M is 0 for a token whose distance is above its limit and that
    the update would take further: A > 0 and p_new > p_old (limit clip_high), or A < 0 and p_new < p_old (limit clip_low).

    With `clip_dual` the weight of the gradient is min(ratio, clip_dual). bounded: M = 0, so the token has no gradient.
    """
    risen, fallen = inputs.log_ratio.detach() > 0, inputs.log_ratio.detach() < 0
    too_far_up = (inputs.advantages > 0) & risen & (distance > config.clip_high)
    too_far_down = (inputs.advantages < 0) & fallen & (distance > config.clip_low)
    bounded = too_far_up | too_far_down
    weight = inputs.ratio.detach()
    if config.clip_dual is not None:
        weight = weight.clamp(max=config.clip_dual)
    surrogate = weight * (inputs.log_probs - inputs.log_probs.detach()).exp()
    return TokenLosses(torch.where(bounded, 0.0, -surrogate * inputs.advantages), bounded)
