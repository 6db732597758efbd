"""Sums and means over the tokens that count, and how a loss is aggregated from its tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.config.schema import Aggregation

_CACHED_ELEMENTS = 1 << 17  # of a block: what is in between of several operations on it stays in a core's cache


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with 0 where `mask` is False. Unlike `x * mask`, a masked NaN reaches neither the value nor the gradient."""
    return torch.where(mask, x, 0.0)


def block_rows(x: Tensor) -> int:
    """So few rows of x (B, R) that a chain of operations on them runs at the speed of the cache, not of the memory."""
    return max(1, _CACHED_ELEMENTS // max(x.shape[1], 1))


def row_blocks(x: Tensor) -> Iterator[slice]:
    """The rows of x (B, R) in blocks of `block_rows`."""
    step = block_rows(x)
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def masked_row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """(B,): the sum of each row of x (B, R) over the True tokens of mask (B, R)."""
    sums = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    for rows in row_blocks(x):
        sums[rows] = masked(x[rows], mask[rows]).sum(dim=1)
    return sums


def row_lengths(mask: Tensor) -> Tensor:
    """(B,) int32: True tokens of each row. In blocks, because torch sums a converted copy of what it is given."""
    lengths = torch.empty(mask.shape[0], dtype=torch.int32, device=mask.device)
    for rows in row_blocks(mask):
        lengths[rows] = mask[rows].sum(dim=1, dtype=torch.int32)
    return lengths


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x (B, R) over the True tokens of mask (B, R), a scalar; 0 when no token is True."""
    return masked_row_sums(x, mask).sum() / row_lengths(mask).sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor, epsilon: float = 1e-8, out: Tensor | None = None) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over the True tokens of mask, both (B, R); 0 in masked slots. `out` may be x.

    The variance is the unbiased one (divided by n - 1). With a single valid token it is taken as 0, so the result is 0.
    """
    num_tokens = row_lengths(mask).sum()
    mean = masked_row_sums(x, mask).sum() / num_tokens.clamp(min=1)
    deviation, squares = torch.empty_like(x) if out is None else out, torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    for rows in row_blocks(x):
        torch.where(mask[rows], x[rows] - mean, torch.zeros_like(mean), out=deviation[rows])
        squares[rows] = deviation[rows].square().sum(dim=1)
    variance = squares.sum() / (num_tokens - 1).clamp(min=1)
    return deviation.mul_(torch.rsqrt(variance + epsilon))


def front_slots(mask: Tensor) -> Tensor | None:
    """(b, R) int64: where each valid token of mask (b, R) goes; R for all others. None where all stand there already."""
    if not (mask[:, 1:] > mask[:, :-1]).any():
        return None
    return torch.where(mask, mask.cumsum(1) - 1, mask.shape[1])


def to_front(x: Tensor, slots: Tensor) -> Tensor:
    """x (b, R) with its valid tokens at the front, in their order, and 0 behind; what is masked must be 0 in x."""
    return x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, slots, x)[:, :-1]


def from_front(x: Tensor, slots: Tensor) -> Tensor:
    """The inverse of `to_front`."""
    return torch.nn.functional.pad(x, (0, 1)).gather(1, slots)


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
                "norm_tokens is null, but aggregation=sequence_mean_token_sum_norm divides by it; "
                "set it to data.max_response_length, and keep it when that changes"
            )
        per_token = per_token / norm_tokens
    return per_token.sum() / max(denominator, 1.0)
