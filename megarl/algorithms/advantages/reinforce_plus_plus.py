"""REINFORCE++: advantages normalised over the whole batch instead of each prompt's group."""

from __future__ import annotations

import torch

from megarl.algorithms.advantages.gae import rewards_to_go
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages
from megarl.algorithms.masked import whiten
from megarl.config.schema import AdvantageConfig


def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """The discounted rewards to go, whitened over all valid tokens of the batch (Hu 2025, arXiv 2501.03262).

    With the KL penalty in the reward, as the paper has it, each token sees the penalties from itself on. Returns are the rewards to
    go before whitening.
    """
    returns = rewards_to_go(inputs.token_level_rewards, inputs.response_mask, config.gamma)
    return Advantages(whiten(returns, inputs.response_mask), returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """outcome - mean of the prompt's samples, then whitened over all valid tokens of the batch (the same paper's variant for several
    samples of a prompt). A group of one has nothing to compare and stands at 0 before whitening."""
    centred, lengths = inputs.groups.deviation(inputs.outcomes), inputs.lengths
    num_tokens = lengths.sum()
    centred = centred - (lengths * centred).sum() / num_tokens.clamp(min=1)
    variance = (lengths * centred.square()).sum() / (num_tokens - 1).clamp(min=1)
    return inputs.on_every_token(centred * torch.rsqrt(variance + 1e-8))
