"""Per-token policy losses. The dictionary lists all of them."""

from __future__ import annotations

from megarl.algorithms.policy_losses import covariance, ratio
from megarl.algorithms.policy_losses.inputs import PolicyInputs, PolicyLoss, TokenLosses
from megarl.config.schema import PolicyLossKind

__all__ = ["POLICY_LOSSES", "PolicyInputs", "PolicyLoss", "TokenLosses"]

POLICY_LOSSES: dict[PolicyLossKind, PolicyLoss] = {**ratio.LOSSES, **covariance.LOSSES}
