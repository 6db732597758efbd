"""KL-Cov: the tokens that lower the entropy most pay for moving."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.algorithms.policy_losses.covariance import SELECTED_TOKENS, number_to_select, token_covariance
from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses
from megarl.config.schema import PolicyLossConfig


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
