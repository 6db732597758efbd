"""Clip-Cov: some of the tokens that lower the entropy most take no part in the update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.algorithms.policy_losses.covariance import SELECTED_TOKENS, number_to_select, token_covariance
from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses
from megarl.algorithms.policy_losses.ppo_clip import ppo_clip
from megarl.config.schema import PolicyLossConfig


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
