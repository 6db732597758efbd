"""Generalised advantage estimation: a critic's values and a discounted sum of their errors."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, needed
from megarl.algorithms.masked import masked, row_blocks, whiten
from megarl.algorithms.tool_gaps import from_front, front_slots, to_front
from megarl.config.schema import AdvantageConfig


def gae(token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> Advantages:
    """Advantages and returns for (B, R) tensors (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k delta_{t+k}; returns = A + V. The episode ends after the
    last valid token (V = 0 there). A reward in a masked slot is ignored.

    A token outside the mask (padding, tool output) is not a step of the episode: it gets 0, and the token before a hole is
    followed by the token after it.

    What is summed are the returns, R_t = r_t + gamma (1 - lam) V_{t+1} + gamma lam R_{t+1}: the same recursion with one pass less.
    """
    advantages, returns = torch.empty_like(token_level_rewards), torch.empty_like(token_level_rewards)
    for rows in row_blocks(token_level_rewards):
        mask = response_mask[rows]
        slots = front_slots(mask)
        steps, kept_values = masked(token_level_rewards[rows], mask), masked(values[rows], mask)
        next_values = kept_values
        if slots is not None:
            steps, next_values = to_front(steps, slots), to_front(kept_values, slots)
        if lam != 1.0:
            steps[:, :-1].add_(next_values[:, 1:], alpha=gamma * (1.0 - lam))
        sums = discounted_suffix_sums(steps, gamma * lam)
        returns[rows] = sums if slots is None else from_front(sums, slots)
        torch.sub(returns[rows], kept_values, out=advantages[rows])
    return Advantages(advantages, returns)


def whitened_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Whitened over the valid tokens of the whole batch, as PPO for language models does (Ouyang et al. 2022); returns are not."""
    values = needed(inputs.values, "gae", "the critic's `values`", "use grpo to train without a critic")
    advantages, returns = gae(inputs.token_level_rewards, values, inputs.response_mask, config.gamma, config.lam)
    return Advantages(whiten(advantages, inputs.response_mask, out=advantages), returns)


def rewards_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """(B, R): sum_k gamma^k r_{t+k} over the valid tokens from t on; 0 in masked slots."""
    returns = torch.empty_like(token_level_rewards)
    for rows in row_blocks(token_level_rewards):
        mask = response_mask[rows]
        slots = front_slots(mask)
        steps = masked(token_level_rewards[rows], mask)
        sums = discounted_suffix_sums(steps if slots is None else to_front(steps, slots), gamma)
        returns[rows] = sums if slots is None else from_front(sums, slots)
    return returns


_CHUNK_TOKENS = 16  # of a row: as many multiplications an element, and a sixteenth of the tokens are left to be added up


def discounted_suffix_sums(x: Tensor, discount: float) -> Tensor:
    """(B, R): y_t = x_t + discount y_{t+1}.

    In chunks of a row by a product with the triangle of the discount's powers; then the chunks' totals, by themselves; then to each token
    what comes after its chunk. So there is no loop over tokens, and rounding grows as in a sum of 16 and one of log2(R / 16).
    """
    num_rows, num_tokens = x.shape
    padded = torch.nn.functional.pad(x, (0, -num_tokens % _CHUNK_TOKENS))
    distance = torch.arange(_CHUNK_TOKENS, device=x.device)
    powers = discount ** (distance[:, None] - distance).clamp(min=0).to(x.dtype)
    sums = (padded.view(-1, _CHUNK_TOKENS) @ powers.tril()).view(num_rows, -1, _CHUNK_TOKENS)
    following = _suffix_sums_by_doubling(sums[:, :, 0].contiguous(), discount**_CHUNK_TOKENS)
    sums[:, :-1].addcmul_(following[:, 1:, None], discount ** (_CHUNK_TOKENS - distance).to(x.dtype))
    return sums.view(num_rows, -1)[:, :num_tokens]


def _suffix_sums_by_doubling(x: Tensor, discount: float) -> Tensor:
    """As `discounted_suffix_sums`; what is in x is lost. After each pass a token holds the sum over twice as many tokens as before."""
    sums, longer = x, torch.empty_like(x)
    span, factor = 1, discount
    while span < x.shape[1] and factor != 0.0:
        torch.add(sums[:, :-span], sums[:, span:], alpha=factor, out=longer[:, :-span])
        longer[:, -span:] = sums[:, -span:]
        sums, longer = longer, sums
        span, factor = 2 * span, factor * factor
    return sums
