"""Policy losses that treat tokens with a high covariance of log-prob and advantage separately.

These tokens reduce the policy's entropy the most (Cui et al. 2025, arXiv 2505.22617).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.algorithms.masked import (
    as_rows,
    empty_like,
    leaves_nothing_out,
    map_tokens,
    masked_mean,
    of_form,
    row_lengths,
)
from megarl.algorithms.policy_losses.inputs import PolicyInputs, PolicyLoss, TokenLosses
from megarl.algorithms.policy_losses.ratio import ppo_clip
from megarl.batch.ragged import Column
from megarl.config.schema import PolicyLossConfig, PolicyLossKind

SELECTED_TOKENS = "selected_tokens"  # the batch key of the tokens that clip_cov and kl_cov select


def clip_cov(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """Clip-Cov: the PPO surrogate, with loss 0 for the selected tokens.

    `bounded` marks tokens that are clipped as in PPO, or selected.
    """
    losses = ppo_clip(inputs, config)
    loss = torch.where(inputs.selected, 0.0, losses.loss)
    return TokenLosses(loss, losses.bounded | inputs.selected, losses.dual_clipped)


def select_for_clip_cov(
    columns: Mapping[str, Column], mask: Column, config: PolicyLossConfig, seed: int
) -> dict[str, Column]:
    """Select tokens for clip_cov.

    `covariance.share` of the mini-batch's tokens are drawn uniformly from those whose covariance is between
    `covariance.low` and `covariance.high`.

    Returns:
        `selected_tokens`, (B, R) bool.
    """
    low = config.covariance.low
    high = config.covariance.high
    is_candidate = map_tokens(
        lambda x: (x > low) & (x < high), mask, token_covariance(columns, mask), dtype=torch.bool
    )
    candidates = as_rows(is_candidate).values.nonzero().flatten()
    # A separate generator makes the draw independent of the global random state.
    drawn = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))

    return _selected(candidates[drawn[: number_to_select(mask, config.covariance.share)]], mask)


def kl_cov(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """KL-Cov: -ratio A, plus kl_coefficient |new - old| for the selected tokens.

    The distance is that of the authors' code.

    The ratio is not clipped. `bounded` marks the selected tokens.
    """
    penalty = config.covariance.kl_coefficient * inputs.log_ratio.abs()
    loss = -inputs.ratio * inputs.advantages + torch.where(inputs.selected, penalty, 0.0)
    return TokenLosses(loss, inputs.selected)


def select_for_kl_cov(
    columns: Mapping[str, Column], mask: Column, config: PolicyLossConfig, seed: int
) -> dict[str, Column]:
    """Select tokens for kl_cov.

    The selected tokens are the `covariance.share` of the mini-batch's tokens with the largest covariance.

    Returns:
        `selected_tokens`, (B, R) bool.
    """
    covariance = as_rows(token_covariance(columns, mask)).values
    # Masked tokens must never be among the largest.
    if not leaves_nothing_out(mask):
        covariance = covariance.masked_fill(~as_rows(mask).flat(), -torch.inf)
    return _selected(covariance.topk(number_to_select(mask, config.covariance.share)).indices, mask)


def _selected(tokens: Tensor, mask: Column) -> dict[str, Column]:
    """Build the `selected_tokens` column from token indices into the concatenation of all rows."""
    selected = empty_like(mask, torch.bool)
    selected.values.zero_()[tokens] = True
    return {SELECTED_TOKENS: of_form(selected, mask)}


def token_covariance(columns: Mapping[str, Column], mask: Column) -> Column:
    """Return (log p - mean log p) (A - mean A) of each token, (B, R).

    log p are the `old_log_probs` and A the `advantages`, with means over the valid tokens of the mini-batch.
    Masked slots are 0.

    Its mean is the covariance of log-prob and advantage. A policy gradient step reduces the entropy in
    proportion to it.
    """
    log_probs = columns["old_log_probs"]
    advantages = columns["advantages"]
    mean_log_prob = masked_mean(log_probs, mask)
    mean_advantage = masked_mean(advantages, mask)

    return map_tokens(
        lambda p, advantage: (p - mean_log_prob) * (advantage - mean_advantage), mask, log_probs, advantages
    )


def number_to_select(mask: Column, share: float) -> int:
    """Return the number of tokens to select: at least one if there is any token."""
    num_tokens = int(row_lengths(mask).sum())
    return min(num_tokens, max(1, int(share * num_tokens)))


LOSSES = {
    PolicyLossKind.clip_cov: PolicyLoss(clip_cov, prepare=select_for_clip_cov),
    PolicyLossKind.kl_cov: PolicyLoss(kl_cov, prepare=select_for_kl_cov),
}
