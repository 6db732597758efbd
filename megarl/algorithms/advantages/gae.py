"""Generalised advantage estimation: a critic's values and a discounted sum of their errors."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, needed
from megarl.algorithms.masked import masked, row_blocks, whiten
from megarl.config.schema import AdvantageConfig

_BLOCK_TOKENS = 32  # a block's sums are one product with a (32, 32) matrix


def gae(token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> Advantages:
    """Advantages and returns for (B, R) tensors (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k delta_{t+k}; returns = A + V. The episode ends after the
    last valid token (V = 0 there). A reward in a masked slot is ignored.

    A token outside the mask (padding, tool output) is not a step of the episode: it gets 0, and the token before a hole is
    followed by the token after it.

    What is summed are the returns, R_t = r_t + gamma (1 - lam) V_{t+1} + gamma lam R_{t+1}, the same recursion with one pass less.
    """
    advantages, returns = torch.empty_like(token_level_rewards), torch.empty_like(token_level_rewards)
    for rows in row_blocks(token_level_rewards):
        mask = response_mask[rows]
        steps, kept_values = masked(token_level_rewards[rows], mask), masked(values[rows], mask)
        next_values, slots = kept_values, None
        if _has_holes(mask):
            slots = torch.where(mask, mask.cumsum(1) - 1, mask.shape[1])  # valid tokens to the front; the others share a slot behind
            steps, next_values = _to_front(steps, slots), _to_front(kept_values, slots)
        if lam != 1.0:
            steps[:, :-1].add_(next_values[:, 1:], alpha=gamma * (1.0 - lam))
        sums = discounted_suffix_sums(steps, gamma * lam)
        if slots is not None:
            sums = torch.nn.functional.pad(sums, (0, 1)).gather(1, slots)
        returns[rows] = masked(sums, mask)
        torch.sub(returns[rows], kept_values, out=advantages[rows])
    return Advantages(advantages, returns)


def whitened_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Whitened over the valid tokens of the whole batch, as PPO for language models does (Ouyang et al. 2022); returns are not."""
    values = needed(inputs.values, "gae", "the critic's `values`", "use grpo to train without a critic")
    advantages, returns = gae(inputs.token_level_rewards, values, inputs.response_mask, config.gamma, config.lam)
    return Advantages(whiten(advantages, inputs.response_mask), returns)


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """(B, R): sum_k gamma^k r_{t+k} over the valid tokens from t on; 0 in masked slots."""
    no_values = torch.zeros((), dtype=token_level_rewards.dtype, device=token_level_rewards.device).expand_as(token_level_rewards)
    return gae(token_level_rewards, no_values, response_mask, gamma, 1.0).returns


def discounted_suffix_sums(x: Tensor, discount: float) -> Tensor:
    """(B, R): y_t = x_t + discount y_{t+1}.

    In blocks: each is a matrix product, then what comes after a block is carried into it. Rounding grows with the number of
    blocks, and the work does not run token by token.
    """
    num_rows, num_tokens = x.shape
    block = min(_BLOCK_TOKENS, max(num_tokens, 1))
    num_blocks = -(-num_tokens // block)
    if num_blocks * block != num_tokens:
        x = torch.nn.functional.pad(x, (0, num_blocks * block - num_tokens))
    powers = discount ** torch.arange(block + 1, dtype=x.dtype, device=x.device)
    distance = torch.arange(block, device=x.device)
    lag = distance[:, None] - distance[None, :]  # from token t (column) to a later token (row)
    within = (x.reshape(-1, block) @ torch.where(lag >= 0, powers[lag.clamp(min=0)], 0.0)).view(num_rows, num_blocks, block)
    if num_blocks > 1:
        # A block's first sum is what it adds to the end of the block before, which reaches token t with block - t powers.
        after = discounted_suffix_sums(within[:, :, 0].contiguous(), float(powers[-1]))[:, 1:]
        within[:, :-1].addcmul_(after[:, :, None], powers[1:].flip(0))
    return within.view(num_rows, -1)[:, :num_tokens]


def _has_holes(mask: Tensor) -> bool:
    """Whether some row has a masked slot before a valid token."""
    return bool((mask[:, 1:] & ~mask[:, :-1]).any())


def _to_front(x: Tensor, slots: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, slots, x)[:, :-1]
