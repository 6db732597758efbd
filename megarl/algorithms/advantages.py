"""Advantage estimators: from token rewards (and values) to advantages and returns.

Shapes: B samples, R padded response tokens. A token outside `response_mask` (padding, tool output) is not a step of the
episode: it is skipped, so the token before a hole is followed by the token after it, and gets 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import masked, whiten
from megarl.config.schema import AdvantageConfig, AdvantageEstimator


class Advantages(NamedTuple):
    advantages: Tensor  # (B, R)
    returns: Tensor  # (B, R), what the critic learns


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """What an estimator may read; `values` is None without a critic."""

    token_level_rewards: Tensor  # (B, R)
    response_mask: Tensor  # (B, R) bool
    uid: np.ndarray  # (B,); samples of one prompt share it
    values: Tensor | None = None  # (B, R)


def gae(token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), for (B, R) tensors.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k delta_{t+k}; returns = A + V. The episode ends after the
    last valid token (V = 0 there). A reward in a masked slot is ignored.

    The sum is a suffix scan by doubling: after step s each token holds the sum over the next 2^s tokens. So the work is
    log2(R) tensor operations instead of R, and rounding grows with log2(R).
    """
    order = torch.argsort(~response_mask, dim=1, stable=True)  # valid tokens to the front, in their order
    rewards = masked(token_level_rewards, response_mask).gather(1, order)
    compact_values = masked(values, response_mask).gather(1, order)

    advantages = rewards + gamma * _shift_left(compact_values, 1) - compact_values
    span, num_tokens = 1, advantages.shape[1]
    while span < num_tokens:
        advantages = advantages + (gamma * lam) ** span * _shift_left(advantages, span)
        span *= 2

    advantages = masked(torch.empty_like(advantages).scatter_(1, order, advantages), response_mask)
    return Advantages(advantages, masked(advantages + values, response_mask))


def _shift_left(x: Tensor, num_tokens: int) -> Tensor:
    """x[:, t + num_tokens] at t, and 0 past the end."""
    return torch.nn.functional.pad(x[:, num_tokens:], (0, num_tokens))


def grpo(token_level_rewards: Tensor, response_mask: Tensor, uid: np.ndarray, epsilon: float = 1e-6) -> Advantages:
    """Group-relative outcome advantages (Shao et al. 2024, section 4.1.2), for (B, R) rewards.

    The outcome of a sample is the sum of its rewards; its advantage, on each of its tokens, is
    (outcome - mean) / (standard deviation + epsilon) over the samples with the same `uid` (B,), with the unbiased deviation.
    A group of one, and a group whose outcomes are all equal, have no deviation and get 0. There is no critic: returns are the advantages.
    """
    outcomes = masked(token_level_rewards, response_mask).sum(dim=1)
    _, group_of_row = np.unique(uid.astype(str), return_inverse=True)
    group = torch.from_numpy(group_of_row).to(outcomes.device)
    sizes = torch.bincount(group).to(outcomes.dtype)

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros_like(sizes).index_add_(0, group, x)

    deviation = outcomes - (group_sum(outcomes) / sizes)[group]
    standard_deviation = (group_sum(deviation.square()) / (sizes - 1).clamp(min=1)).sqrt()
    scaled = deviation / (standard_deviation[group] + epsilon)
    advantages = masked(scaled[:, None].expand_as(token_level_rewards), response_mask)
    return Advantages(advantages, advantages)


def _whitened_gae(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    if inputs.values is None:
        raise ValueError(
            "algorithm.advantage.estimator=gae needs the critic's `values`, and the batch has none; use grpo to train without a critic"
        )
    advantages, returns = gae(inputs.token_level_rewards, inputs.values, inputs.response_mask, config.gamma, config.lam)
    return Advantages(whiten(advantages, inputs.response_mask), returns)


def _grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    return grpo(inputs.token_level_rewards, inputs.response_mask, inputs.uid)


# `gae` is whitened over the whole batch, as PPO for language models does (Ouyang et al. 2022); its returns are not.
ADVANTAGE_ESTIMATORS: dict[AdvantageEstimator, Callable[[AdvantageInputs, AdvantageConfig], Advantages]] = {
    AdvantageEstimator.gae: _whitened_gae,
    AdvantageEstimator.grpo: _grpo,
}
