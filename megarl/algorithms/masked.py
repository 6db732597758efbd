"""Sums and means over the tokens that count, and how a loss is aggregated from its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.batch.ragged import Column, RaggedTensor
from megarl.config.schema import Aggregation


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with 0 where `mask` is False. Unlike `x * mask`, a masked NaN reaches neither the value nor the
    gradient."""
    return torch.where(mask, x, 0.0)


# ---- columns of a batch, on the host and without a graph
#
# Inside a run they are rows of tokens. Estimators and metrics also take (B, R) tensors, which is what a
# function of the user has, and what one writes in a notebook or a test: such a tensor is a view of rows of R
# values each (`as_rows`), whose mask says which count, so that every function has one implementation.
# Functions of several columns take all of one form.


def as_rows(x: Column) -> RaggedTensor:
    """x, or the rows of slots of a tensor x (B, R), which share memory with it."""
    return x if isinstance(x, RaggedTensor) else RaggedTensor.of_slots(x)


def of_form(rows: RaggedTensor, x: Column) -> Column:
    """The rows, of x's lengths, in the form of x."""
    return rows if isinstance(x, RaggedTensor) else rows.values.view(x.shape)


def leaves_nothing_out(mask: Column) -> bool:
    """Whether all tokens of the rows count, so that a mask need not be applied."""
    return bool((mask.values if isinstance(mask, RaggedTensor) else mask).all())


def rows_like(mask: Column, columns: Iterable[Column]) -> list[RaggedTensor]:
    """The columns as rows, of the same lengths as the mask's. Raises ValueError where one has others, such as
    a padded tensor beside rows of tokens: its values would be taken for those of other tokens."""
    lengths = as_rows(mask).lengths
    rows = [as_rows(column) for column in columns]
    for column in rows:
        if not torch.equal(column.lengths, lengths):
            raise ValueError(
                f"columns of a batch must be of the same tokens: the mask has {as_rows(mask)!r}, another "
                f"column {column!r}"
            )

    return rows


class TokenBlock(NamedTuple):
    """Of some rows of a batch. tokens: which of all rows' tokens, one row behind the other, are theirs.
    lengths: (b,) of the rows. mask: (n,) bool, None where all tokens count. columns: (n,) each."""

    rows: slice
    tokens: slice
    lengths: Tensor
    mask: Tensor | None
    columns: list[Tensor]

    def only_valid(self, x: Tensor) -> Tensor:
        """x (n,) with 0 in place of tokens that do not count."""
        return x if self.mask is None else masked(x, self.mask)

    def valid(self, x: Tensor) -> Tensor:
        """(k,): of x (n,), the tokens that count."""
        return x if self.mask is None else x[self.mask]

    def row_sums(self, x: Tensor) -> Tensor:
        """(b,): the sum of each row's part of x (n,)."""
        has_tokens = self.lengths > 0
        sums = x.new_zeros(len(self.lengths))
        starts = (self.lengths.cumsum(0) - self.lengths)[has_tokens]
        if len(starts):
            sums[has_tokens] = torch.from_numpy(np.add.reduceat(x.numpy(), starts.numpy())).to(x.dtype)

        return sums


def token_blocks(mask: Column, *columns: Column) -> Iterator[TokenBlock]:
    """All rows in order, so many at a time that a chain of operations on their tokens runs at the speed of
    the cache, not of the memory."""
    rows_of_mask = as_rows(mask)
    rows_of_columns = rows_like(mask, columns)
    all_count = leaves_nothing_out(mask)
    ends = rows_of_mask.lengths.cumsum(0).tolist()
    # A packed column is cut into slices without a copy; others are flattened block by block.
    flat = [column.flat() if column.is_packed else None for column in rows_of_columns]

    for rows in rows_of_mask.blocks():
        tokens = slice(ends[rows.start - 1] if rows.start else 0, ends[rows.stop - 1])
        yield TokenBlock(
            rows,
            tokens,
            rows_of_mask.lengths[rows],
            None if all_count else rows_of_mask.select(rows).flat(),
            [
                column.select(rows).flat() if whole is None else whole[tokens]
                for column, whole in zip(rows_of_columns, flat, strict=True)
            ],
        )


def empty_like(x: Column, dtype: torch.dtype) -> RaggedTensor:
    """Rows of the same lengths, one behind the other, to be written."""
    return RaggedTensor.empty(as_rows(x), dtype)


def map_tokens(
    function: Callable[..., Tensor],
    mask: Column,
    *columns: Column,
    dtype: torch.dtype | None = None,
    out: Column | None = None,
) -> Column:
    """What the function makes of each token by itself, of blocks of tokens (n,) of the columns; 0 or False
    where the mask is False. In the dtype of the first column, or in `dtype`; in new memory, or in that of
    `out`, whose rows stand one behind the other."""
    made = empty_like(mask, dtype or columns[0].dtype) if out is None else as_rows(out)
    for block in token_blocks(mask, *columns):
        made.values[block.tokens] = block.only_valid(function(*block.columns))
    return of_form(made, mask)


def itself(x: Tensor) -> Tensor:
    return x


def masked_column(x: Column, mask: Column) -> Column:
    """As `masked`; x itself where nothing is left out."""
    return x if leaves_nothing_out(mask) else map_tokens(itself, mask, x)


def on_every_token(per_row: Tensor, mask: Column) -> Column:
    """The value (B,) of a row on each of its valid tokens; 0 or False where the mask is False."""
    values = empty_like(mask, per_row.dtype)
    for row, value in zip(values.each(), per_row.tolist(), strict=True):
        row.fill_(value)
    return masked_column(of_form(values, mask), mask)


def row_sums(value: Callable[..., Tensor], mask: Column, *columns: Column) -> Tensor:
    """(B,): of value(*columns), of each token by itself, the sum of each row over the True tokens of the
    mask; in the first's dtype."""
    sums = torch.empty(mask.shape[0], dtype=columns[0].dtype)
    for block in token_blocks(mask, *columns):
        sums[block.rows] = block.row_sums(block.only_valid(value(*block.columns)))
    return sums


def masked_row_sums(x: Column, mask: Column) -> Tensor:
    """(B,): the sum of each row of x (B, R) over the True tokens of mask (B, R)."""
    return row_sums(itself, mask, x)


def row_lengths(mask: Column) -> Tensor:
    """(B,) int32: True tokens of each row."""
    rows = as_rows(mask)
    if leaves_nothing_out(rows):
        return rows.lengths.int()
    lengths = torch.empty(len(rows), dtype=torch.int32)

    for block in token_blocks(rows):
        assert block.mask is not None
        lengths[block.rows] = block.row_sums(block.mask.int())

    return lengths


class Moments(NamedTuple):
    """Of a value over tokens. mean and variance, the mean squared deviation, are summed in float64; without a
    token they are 0."""

    number: int
    mean: float
    variance: float
    maximum: float
    minimum: float


def moments(value: Callable[..., Tensor], mask: Column, *columns: Column) -> Moments:
    """Of value(*columns), of each token by itself, over the True tokens of the mask."""
    number = 0
    shift = 0.0
    total = 0.0
    squares = 0.0
    maximum = -math.inf
    minimum = math.inf

    for block in token_blocks(mask, *columns):
        x = block.valid(value(*block.columns))
        if len(x) == 0:
            continue
        low, high = x.aminmax()
        maximum = max(maximum, float(high))
        minimum = min(minimum, float(low))
        # deviations from any one value: where all are the same, nothing is left of them
        shift = shift if number else float(x[0])
        exact = x.to(torch.float64, copy=True).sub_(shift)
        number = number + len(x)
        total = total + float(exact.sum())
        squares = squares + float(torch.dot(exact, exact))

    if number == 0:
        return Moments(0, 0.0, 0.0, maximum, minimum)
    offset = total / number
    # Rounding may leave the variance slightly below 0.
    return Moments(number, shift + offset, max(squares / number - offset * offset, 0.0), maximum, minimum)


def masked_mean(x: Column, mask: Column) -> float:
    """Mean of x (B, R) over the True tokens of mask (B, R); 0 when no token is True."""
    number = 0
    total = 0.0

    for block in token_blocks(mask, x):
        # The sum is in float64, because float32 loses digits over many tokens.
        valid = block.valid(block.columns[0])
        number = number + len(valid)
        total = total + float(valid.sum(dtype=torch.float64))

    return total / max(number, 1)


def whiten(x: Column, mask: Column, epsilon: float = 1e-8, out: Column | None = None) -> Column:
    """(x - mean) / sqrt(variance + epsilon) over the True tokens of mask, both (B, R); 0 in masked slots.
    out: as of map_tokens; may be x.

    The variance is the unbiased one (divided by n - 1). With a single valid token it is taken as 0, so the
    result is 0.
    """
    number, mean, variance, *_ = moments(itself, mask, x)
    # The moments divide by n, and n / (n - 1) makes the variance the unbiased one.
    scale = 1 / math.sqrt(variance * number / max(number - 1, 1) + epsilon)
    return map_tokens(lambda x: (x - mean).mul_(scale), mask, x, out=out)


def front_slots(mask: Tensor) -> Tensor | None:
    """(b, R) int64: where each valid token of mask (b, R) goes; R for all others. None where all stand there
    already."""
    if not (mask[:, 1:] > mask[:, :-1]).any():
        return None
    return torch.where(mask, mask.cumsum(1) - 1, mask.shape[1])


def to_front(x: Tensor, slots: Tensor) -> Tensor:
    """x (b, R) with its valid tokens at the front, in their order, and 0 behind; what is masked must be 0 in
    x."""
    return x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, slots, x)[:, :-1]


def from_front(x: Tensor, slots: Tensor) -> Tensor:
    """The inverse of `to_front`."""
    return torch.nn.functional.pad(x, (0, 1)).gather(1, slots)


def denominator(response_mask: Column, kind: Aggregation) -> float:
    """Valid tokens for `token_mean`, rows that have a valid token for the sequence means; response_mask is
    (B, R) bool.

    It adds over disjoint sets of rows. Rows without a valid token (filler of an uneven batch) do not count.
    """
    lengths = row_lengths(response_mask)
    return float(lengths.sum() if kind == Aggregation.token_mean else (lengths > 0).sum())


def aggregate(
    per_token: Tensor, mask: Tensor, kind: Aggregation, denominator: float, norm_tokens: int | None = None
) -> Tensor:
    """The share of these rows (b, R) in the mini-batch's loss, a scalar; `denominator` is that of the whole
    mini-batch.

    token_mean: all valid tokens weigh the same. sequence_mean_token_sum: the sum over a row's tokens,
    averaged over rows.
    sequence_mean_token_mean: the mean over a row's tokens, averaged over rows. sequence_mean_token_sum_norm:
    the sum over a row's tokens divided by the constant `norm_tokens`, averaged over rows (Dr. GRPO, Liu et
    al. 2025, arXiv 2503.20783). A mini-batch without tokens gives 0. Raises ValueError where the kind needs
    `norm_tokens` and there is none.
    """
    # Masked slots may hold anything, even NaN, which a product with 0 would keep.
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
