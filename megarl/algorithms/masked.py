"""Sums and means over the tokens that count, and how a loss is aggregated from its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megarl.batch.ragged import Column, RaggedTensor
from megarl.config.schema import Aggregation

_CACHED_ELEMENTS = 1 << 17  # of a block: what is in between of several operations on it stays in a core's cache


def empty_like(x: Column, dtype: torch.dtype) -> Column:
    """Of the same shape, to be written."""
    return RaggedTensor.empty(x, dtype) if isinstance(x, RaggedTensor) else torch.empty(x.shape, dtype=dtype, device=x.device)


def map_tokens(function: Callable[..., Tensor], first: Column, *others: Column) -> Column:
    """What the function makes of each token by itself, of blocks of all, which are of one form; in the dtype of the first."""
    made = empty_like(first, first.dtype)
    for rows in row_blocks(first):
        if isinstance(made, RaggedTensor):
            made.select(rows).flat().copy_(function(*(tokens_of(x, rows) for x in (first, *others))))
        else:
            made[rows] = function(*(x[rows] for x in (first, *others)))
    return made


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with 0 where `mask` is False. Unlike `x * mask`, a masked NaN reaches neither the value nor the gradient."""
    return torch.where(mask, x, 0.0)


def block_rows(x: Column) -> int:
    """So few rows of x (B, R) that a chain of operations on them runs at the speed of the cache, not of the memory."""
    return max(1, _CACHED_ELEMENTS // max(x.shape[1], 1))


def row_blocks(x: Column) -> Iterator[slice]:
    """The rows of x (B, R) in blocks that fit the cache; `x[rows]` is (b, R), of rows of tokens padded to the longest of the block."""
    if isinstance(x, RaggedTensor):
        return x.blocks()
    step = block_rows(x)
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def rows_of(x: Column, rows: slice) -> Column:
    """Those rows of x, which share memory with it."""
    return x.select(rows) if isinstance(x, RaggedTensor) else x[rows]


def tokens_of(x: Column, rows: slice = slice(None)) -> Tensor:
    """(n,): those rows' values one behind the other, without padding where there is none."""
    part = rows_of(x, rows)
    return part.flat() if isinstance(part, RaggedTensor) else part.flatten()


def leaves_nothing_out(mask: Column) -> bool:
    """Whether all tokens of the rows count, so that a mask need not be applied."""
    return isinstance(mask, RaggedTensor) and bool(mask.values.all())


def masked_column(x: Column, mask: Column) -> Column:
    """As `masked`, without a graph; x itself where nothing is left out."""
    return x if leaves_nothing_out(mask) else map_tokens(masked, x, mask)


def masked_row_sums(x: Column, mask: Column) -> Tensor:
    """(B,): the sum of each row of x (B, R) over the True tokens of mask (B, R)."""
    sums, all_count = torch.empty(x.shape[0], dtype=x.dtype, device=x.device), leaves_nothing_out(mask)
    for rows in row_blocks(x):
        if isinstance(x, RaggedTensor):
            values = tokens_of(x, rows)
            kept = values if all_count else masked(values, tokens_of(mask, rows))
            sums[rows] = torch.segment_reduce(kept, "sum", lengths=x.lengths[rows].to(x.device), initial=0)
        else:
            sums[rows] = masked(x[rows], mask[rows]).sum(dim=1)
    return sums


def row_lengths(mask: Column) -> Tensor:
    """(B,) int32: True tokens of each row. In blocks, because torch sums a converted copy of what it is given."""
    if leaves_nothing_out(mask):
        assert isinstance(mask, RaggedTensor)
        return mask.lengths.int().to(mask.device)
    lengths = torch.empty(mask.shape[0], dtype=torch.int32, device=mask.device)
    for rows in row_blocks(mask):
        lengths[rows] = mask[rows].sum(dim=1, dtype=torch.int32)
    return lengths


def masked_mean(x: Column, mask: Column) -> Tensor:
    """Mean of x (B, R) over the True tokens of mask (B, R), a scalar; 0 when no token is True."""
    return masked_row_sums(x, mask).sum() / row_lengths(mask).sum().clamp(min=1)


def whiten(x: Column, mask: Column, epsilon: float = 1e-8, out: Column | None = None) -> Column:
    """(x - mean) / sqrt(variance + epsilon) over the True tokens of mask, both (B, R); 0 in masked slots. `out` may be x.

    The variance is the unbiased one (divided by n - 1). With a single valid token it is taken as 0, so the result is 0.
    """
    num_tokens = row_lengths(mask).sum()
    mean = masked_row_sums(x, mask).sum() / num_tokens.clamp(min=1)
    deviation, squares = empty_like(x, x.dtype) if out is None else out, torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    for rows in row_blocks(x):
        block = masked(x[rows] - mean, mask[rows])
        deviation[rows], squares[rows] = block, block.square().sum(dim=1)
    variance = squares.sum() / (num_tokens - 1).clamp(min=1)
    (deviation.values if isinstance(deviation, RaggedTensor) else deviation).mul_(torch.rsqrt(variance + epsilon))
    return deviation


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


def denominator(response_mask: Column, kind: Aggregation) -> float:
    """Valid tokens for `token_mean`, rows that have a valid token for the sequence means; response_mask is (B, R) bool.

    It adds over disjoint sets of rows. Column without a valid token (filler of an uneven batch) do not count.
    """
    lengths = row_lengths(response_mask)
    return float(lengths.sum() if kind == Aggregation.token_mean else (lengths > 0).sum())


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
