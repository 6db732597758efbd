"""Losses that treat the tokens apart which are about to lower the policy's entropy most."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.algorithms.masked import masked, masked_mean
from megarl.algorithms.policy_losses.inputs import PolicyInputs, PolicyLoss, TokenLosses
from megarl.algorithms.policy_losses.ratio import ppo_clip
from megarl.config.schema import PolicyLossConfig, PolicyLossKind

SELECTED_TOKENS = "selected_tokens"  # the batch key of what clip_cov and kl_cov select


def clip_cov(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """PPO's surrogate, and 0 for the selected tokens (Cui et al. 2025, arXiv 2505.22617).

    bounded: clipped as in PPO, or selected.
    """
    losses = ppo_clip(inputs, config)
    loss = torch.where(inputs.selected, 0.0, losses.loss)
    return TokenLosses(loss, losses.bounded | inputs.selected, losses.dual_clipped)


def select_for_clip_cov(tensors: Mapping[str, Tensor], mask: Tensor, config: PolicyLossConfig, seed: int) -> dict[str, Tensor]:
    """`selected_tokens` (B, R) bool: `covariance.share` of the mini-batch's tokens, drawn without preference from those whose
    covariance is between `covariance.low` and `covariance.high`."""
    covariance = token_covariance(tensors, mask)
    candidates = mask & (covariance > config.covariance.low) & (covariance < config.covariance.high)
    generator = torch.Generator().manual_seed(seed)
    lots = torch.rand(mask.shape, generator=generator).to(mask.device).masked_fill(~candidates, -1.0).flatten()
    number = min(number_to_select(mask, config.covariance.share), int(candidates.sum()))
    selected = torch.zeros_like(mask).flatten()
    selected[lots.topk(number).indices] = True
    return {SELECTED_TOKENS: selected.view_as(mask)}


def kl_cov(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """-ratio A, plus kl_coefficient |new - old| for the selected tokens (Cui et al. 2025, arXiv 2505.22617; the distance
    is that of the authors' code). The ratio is not clipped. bounded: selected.
    """
    penalty = config.covariance.kl_coefficient * inputs.log_ratio.abs()
    loss = -inputs.ratio * inputs.advantages + torch.where(inputs.selected, penalty, 0.0)
    return TokenLosses(loss, inputs.selected)


def select_for_kl_cov(tensors: Mapping[str, Tensor], mask: Tensor, config: PolicyLossConfig, seed: int) -> dict[str, Tensor]:
    """`selected_tokens` (B, R) bool: the `covariance.share` of the mini-batch's tokens with the largest covariance."""
    covariance = token_covariance(tensors, mask).masked_fill(~mask, -torch.inf).flatten()
    selected = torch.zeros_like(mask).flatten()
    selected[covariance.topk(number_to_select(mask, config.covariance.share)).indices] = True
    return {SELECTED_TOKENS: selected.view_as(mask)}


def token_covariance(tensors: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """(B, R): (log p - mean log p) (A - mean A), means over the valid tokens of the mini-batch (Cui et al. 2025, arXiv 2505.22617),
    of `old_log_probs` and `advantages`; 0 in masked slots.

    Its mean is the covariance of log-prob and advantage, by which a step of the policy gradient lowers the entropy.
    """
    log_probs, advantages = masked(tensors["old_log_probs"], mask), masked(tensors["advantages"], mask)
    return masked((log_probs - masked_mean(log_probs, mask)) * (advantages - masked_mean(advantages, mask)), mask)


def number_to_select(mask: Tensor, share: float) -> int:
    """At least one token, where there is one."""
    num_tokens = int(mask.sum())
    return min(num_tokens, max(1, int(share * num_tokens)))


LOSSES = {
    PolicyLossKind.clip_cov: PolicyLoss(clip_cov, prepare=select_for_clip_cov),
    PolicyLossKind.kl_cov: PolicyLoss(kl_cov, prepare=select_for_kl_cov),
}
