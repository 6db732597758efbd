"""How much each token is about to lower the policy's entropy."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megarl.algorithms.masked import masked, masked_mean

SELECTED_TOKENS = "selected_tokens"  # the batch key of what clip_cov and kl_cov select


def token_covariance(tensors: Mapping[str, Tensor], mask: Tensor) -> Tensor:
    """(B, R): (log p - mean log p) (A - mean A), means over the valid tokens of the mini-batch (Cui et al. 2025, arXiv 2505.22617),
    of `old_log_probs` and `advantages`; 0 in masked slots.

    Its mean is the covariance of log-prob and advantage, by which a step of the policy gradient lowers the entropy.
    """
    log_probs, advantages = masked(tensors["old_log_probs"], mask), masked(tensors["advantages"], mask)
    return masked((log_probs - masked_mean(log_probs, mask)) * (advantages - masked_mean(advantages, mask)), mask)


def number_to_select(mask: Tensor, share: float) -> int:
    """At least one token, where there is one."""
    num_tokens = int(mask.sum())
    return min(num_tokens, max(1, int(share * num_tokens)))
