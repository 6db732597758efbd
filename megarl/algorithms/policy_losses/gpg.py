"""GPG: the plain policy gradient."""

from __future__ import annotations

import torch

from megarl.algorithms.policy_losses.inputs import PolicyInputs, TokenLosses
from megarl.config.schema import PolicyLossConfig


def gpg(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """-A log p, without a ratio (Chu et al. 2025, arXiv 2504.02546). It is right for one update per batch; nothing is bounded."""
    return TokenLosses(-inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask))
