"""From per-token losses to one number whose parts add up.

The denominator is that of the whole mini-batch and is fixed before the batch is cut, so the sum of `aggregate` over any
split of the rows into micro-batches and data-parallel ranks is the loss of the whole, and so is the gradient.
"""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.masked import masked
from megarl.config.schema import Aggregation


def denominator(response_mask: Tensor, kind: Aggregation) -> float:
    """Valid tokens for `token_mean`, rows that have a valid token for the sequence means; response_mask is (B, R) bool.

    It adds over disjoint sets of rows. Rows without a valid token (filler of an uneven batch) do not count.
    """
    if kind == Aggregation.token_mean:
        return float(response_mask.sum())
    return float(response_mask.any(dim=1).sum())


def aggregate(per_token: Tensor, mask: Tensor, kind: Aggregation, denominator: float, norm_tokens: int | None = None) -> Tensor:
    """The share of these rows (b, R) in the mini-batch's loss, a scalar; `denominator` is that of the whole mini-batch.

    token_mean: all valid tokens weigh the same. sequence_mean_token_sum: the sum over a row's tokens, averaged over rows.
    sequence_mean_token_mean: the mean over a row's tokens, averaged over rows. sequence_mean_token_sum_norm: the sum over a row's
    tokens divided by the constant `norm_tokens`, averaged over rows (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783). A mini-batch without
    tokens gives 0. Raises ValueError where the kind needs `norm_tokens` and there is none.
    """
    per_token = masked(per_token, mask)
    if kind == Aggregation.sequence_mean_token_mean:
        per_token = per_token / mask.sum(dim=1, keepdim=True).clamp(min=1)
    if kind == Aggregation.sequence_mean_token_sum_norm:
        if norm_tokens is None:
            raise ValueError(
                "algorithm.policy_loss.norm_tokens is null, but aggregation=sequence_mean_token_sum_norm divides by it; "
                "set it to data.max_response_length, and keep it when that changes"
            )
        per_token = per_token / norm_tokens
    return per_token.sum() / max(denominator, 1.0)
