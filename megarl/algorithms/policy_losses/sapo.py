"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

import torch

from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses
from megarl.config.schema import PolicyLossConfig


def sapo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """-f(ratio) A with f(x) = 4 / tau sigmoid(tau (x - 1)) (Gao et al. 2025, arXiv 2511.20347).

    tau is temperature_positive where A > 0, else temperature_negative. At a ratio of 1 the gradient is that of the policy
    gradient; it falls off smoothly on both sides, faster with a larger tau. Nothing is bounded.
    """
    negative = torch.full_like(inputs.advantages, config.sapo.temperature_negative)
    temperature = negative.masked_fill(inputs.advantages > 0, config.sapo.temperature_positive)
    gate = torch.sigmoid(temperature * (inputs.ratio - 1.0)) * 4.0 / temperature
    return TokenLosses(-gate * inputs.advantages, torch.zeros_like(inputs.mask))
