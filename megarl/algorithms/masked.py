"""Sums and means over valid tokens, and the aggregation of per-token losses."""

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
    """Return `x` with 0 where `mask` is False.

    Unlike `x * mask`, a masked NaN reaches neither the value nor the gradient.
    """
    return torch.where(mask, x, 0.0)


# ---- columns of a batch, on the host and without autograd
#
# During a run, a column is rows of tokens (RaggedTensor). Estimators and metrics also accept (B, R) tensors,
# which user functions, notebooks and tests use. `as_rows` views such a tensor as rows of R values each, and
# the mask selects the valid ones, so that every function has one implementation. All columns passed to one
# function must have the same form.


def as_rows(x: Column) -> RaggedTensor:
    """Return x as rows. The rows of a (B, R) tensor share its memory."""
    return x if isinstance(x, RaggedTensor) else RaggedTensor.of_slots(x)


def of_form(rows: RaggedTensor, x: Column) -> Column:
    """Return rows of the same lengths as x in the form of x, ragged or padded."""
    return rows if isinstance(x, RaggedTensor) else rows.values.view(x.shape)


def leaves_nothing_out(mask: Column) -> bool:
    """Return whether all tokens of the rows are valid, so that the mask need not be applied."""
    return bool((mask.values if isinstance(mask, RaggedTensor) else mask).all())


def rows_like(mask: Column, columns: Iterable[Column]) -> list[RaggedTensor]:
    """Return the columns as rows of the same lengths as the mask's.

    Raises:
        ValueError: A column has other lengths, such as a padded tensor together with ragged rows, whose
            values would be assigned to the wrong tokens.
    """
    lengths = as_rows(mask).lengths
    rows = [as_rows(column) for column in columns]
    for column in rows:
        if not torch.equal(column.lengths, lengths):
            raise ValueError(
                f"columns of a batch must cover the same tokens, but the mask is {as_rows(mask)!r} and "
                f"another column is {column!r}"
            )

    return rows


class TokenBlock(NamedTuple):
    """A block of consecutive rows of a batch.

    Attributes:
        tokens: Their tokens, in the concatenation of all rows' tokens.
        lengths: (b,), the lengths of the rows.
        mask: (n,) bool. None if all tokens are valid.
        columns: (n,) each.
    """

    rows: slice
    tokens: slice
    lengths: Tensor
    mask: Tensor | None
    columns: list[Tensor]

    def only_valid(self, x: Tensor) -> Tensor:
        """Return x (n,) with 0 at invalid tokens."""
        return x if self.mask is None else masked(x, self.mask)

    def valid(self, x: Tensor) -> Tensor:
        """Return the valid tokens of x (n,), (k,)."""
        return x if self.mask is None else x[self.mask]

    def row_sums(self, x: Tensor) -> Tensor:
        """Return the sum of each row's part of x (n,), (b,)."""
        # For an empty row, reduceat would return an element of the next row.
        has_tokens = self.lengths > 0
        sums = x.new_zeros(len(self.lengths))
        starts = (self.lengths.cumsum(0) - self.lengths)[has_tokens]
        if len(starts):
            sums[has_tokens] = torch.from_numpy(np.add.reduceat(x.numpy(), starts.numpy())).to(x.dtype)

        return sums


def token_blocks(mask: Column, *columns: Column) -> Iterator[TokenBlock]:
    """Yield all rows in order, in blocks.

    Blocks are small enough that a chain of operations on their tokens runs from the cache.
    """
    rows_of_mask = as_rows(mask)
    rows_of_columns = rows_like(mask, columns)
    all_count = leaves_nothing_out(mask)
    ends = rows_of_mask.lengths.cumsum(0).tolist()
    # A packed column is sliced without a copy; other columns are flattened block by block.
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
    """Return uninitialized packed rows of the same lengths as x."""
    return RaggedTensor.empty(as_rows(x), dtype)


def map_tokens(
    function: Callable[..., Tensor],
    mask: Column,
    *columns: Column,
    dtype: torch.dtype | None = None,
    out: Column | None = None,
) -> Column:
    """Apply an elementwise function to the tokens of columns, block by block.

    The result is 0 or False where the mask is False.

    Args:
        function: Maps a block of tokens (n,) of each column to (n,). It must not mix tokens.
        dtype: Default: the dtype of the first column.
        out: Receives the result; its rows must be packed. Default: new memory.
    """
    made = empty_like(mask, dtype or columns[0].dtype) if out is None else as_rows(out)
    for block in token_blocks(mask, *columns):
        made.values[block.tokens] = block.only_valid(function(*block.columns))
    return of_form(made, mask)


def itself(x: Tensor) -> Tensor:
    return x


def masked_column(x: Column, mask: Column) -> Column:
    """Return x with 0 where the mask is False, or x itself if all tokens are valid."""
    return x if leaves_nothing_out(mask) else map_tokens(itself, mask, x)


def on_every_token(per_row: Tensor, mask: Column) -> Column:
    """Return each row's value (B,) on each of its valid tokens; 0 or False where the mask is False."""
    values = empty_like(mask, per_row.dtype)
    for row, value in zip(values.each(), per_row.tolist(), strict=True):
        row.fill_(value)
    return masked_column(of_form(values, mask), mask)


def row_sums(value: Callable[..., Tensor], mask: Column, *columns: Column) -> Tensor:
    """Return the sum of value(*columns) over each row's valid tokens, (B,), in the dtype of the first column.

    `value` is elementwise.
    """
    sums = torch.empty(mask.shape[0], dtype=columns[0].dtype)
    for block in token_blocks(mask, *columns):
        sums[block.rows] = block.row_sums(block.only_valid(value(*block.columns)))
    return sums


def masked_row_sums(x: Column, mask: Column) -> Tensor:
    """Return the sum of each row of x (B, R) over the valid tokens, (B,)."""
    return row_sums(itself, mask, x)


def row_lengths(mask: Column) -> Tensor:
    """Return the number of valid tokens of each row, (B,) int32."""
    rows = as_rows(mask)
    if leaves_nothing_out(rows):
        return rows.lengths.int()
    lengths = torch.empty(len(rows), dtype=torch.int32)

    for block in token_blocks(rows):
        assert block.mask is not None
        lengths[block.rows] = block.row_sums(block.mask.int())

    return lengths


class Moments(NamedTuple):
    """Statistics of a value over tokens.

    The mean and the variance (mean squared deviation) are accumulated in float64, and are 0 without a token.
    """

    number: int
    mean: float
    variance: float
    maximum: float
    minimum: float


def moments(value: Callable[..., Tensor], mask: Column, *columns: Column) -> Moments:
    """Return the statistics of value(*columns), an elementwise function, over the valid tokens."""
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
        # Sum deviations from one fixed value, so that equal values have a variance of exactly 0.
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
    """Return the mean of x (B, R) over the valid tokens; 0 if there are none."""
    number = 0
    total = 0.0

    for block in token_blocks(mask, x):
        # Accumulate in float64, because float32 loses digits over many tokens.
        valid = block.valid(block.columns[0])
        number = number + len(valid)
        total = total + float(valid.sum(dtype=torch.float64))

    return total / max(number, 1)


def whiten(x: Column, mask: Column, epsilon: float = 1e-8, out: Column | None = None) -> Column:
    """Return (x - mean) / sqrt(variance + epsilon) over the valid tokens of x (B, R); 0 in masked slots.

    The variance is unbiased (divisor n - 1). With a single valid token, the variance counts as 0 and the
    result is 0.

    Args:
        out: Receives the result, see map_tokens; may be x.
    """
    number, mean, variance, *_ = moments(itself, mask, x)
    # The moments divide by n; n / (n - 1) makes the variance unbiased.
    scale = 1 / math.sqrt(variance * number / max(number - 1, 1) + epsilon)
    return map_tokens(lambda x: (x - mean).mul_(scale), mask, x, out=out)


def front_slots(mask: Tensor) -> Tensor | None:
    """Return the index of each valid token after moving valid tokens to the front, (b, R) int64.

    The index of invalid tokens of mask (b, R) is R. The result is None if all valid tokens are at the front
    already.
    """
    # The difference of neighbors is positive where a valid token follows an invalid one.
    if not (mask[:, 1:] > mask[:, :-1]).any():
        return None
    return torch.where(mask, mask.cumsum(1) - 1, mask.shape[1])


def to_front(x: Tensor, slots: Tensor) -> Tensor:
    """Return x (b, R) with its valid tokens moved to the front, in order, followed by 0.

    Masked slots of x must be 0.
    """
    return x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, slots, x)[:, :-1]


def from_front(x: Tensor, slots: Tensor) -> Tensor:
    """Undo `to_front`."""
    return torch.nn.functional.pad(x, (0, 1)).gather(1, slots)


def denominator(response_mask: Column, kind: Aggregation, episodes: np.ndarray | None = None) -> float:
    """Return the loss denominator of the rows with this mask (B, R).

    It is the number of valid tokens for `token_mean`, and the number of responses with a valid token for the
    sequence means. A response is a row, or an episode of several rows.

    Denominators of disjoint sets of episodes add up. Rows without a valid token, which pad an uneven batch,
    do not count.

    Args:
        episodes: The number of each row's episode, (B,). None: each row is one.
    """
    lengths = row_lengths(response_mask)
    if kind == Aggregation.token_mean:
        return float(lengths.sum())
    if episodes is None:
        return float((lengths > 0).sum())
    return float(len(np.unique(episodes[(lengths > 0).numpy()])))


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    kind: Aggregation,
    denominator: float,
    norm_tokens: int | None = None,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """Return the share of these rows (b, R) in the mini-batch loss, a scalar.

    - token_mean: all valid tokens have the same weight.
    - sequence_mean_token_sum: the sum over a response's tokens, averaged over responses.
    - sequence_mean_token_mean: the mean over a response's tokens, averaged over responses.
    - sequence_mean_token_sum_norm: the sum over a response's tokens divided by the constant `norm_tokens`,
      averaged over responses (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).

    A response is a row, or an episode of several rows, which may be in different micro-batches.

    A mini-batch without tokens has a loss of 0.

    Args:
        denominator: `denominator` of the whole mini-batch.
        episode_tokens: The number of valid tokens in the episode of each token's row (b, R). None: each row
            is an episode.

    Raises:
        ValueError: The kind needs `norm_tokens` and it is None.
    """
    # Masked slots may contain any value, even NaN, which a product with 0 would keep.
    per_token = masked(per_token, mask)
    if kind == Aggregation.sequence_mean_token_mean:
        num_tokens = mask.sum(dim=1, keepdim=True) if episode_tokens is None else masked(episode_tokens, mask)
        per_token = per_token / num_tokens.clamp(min=1)

    if kind == Aggregation.sequence_mean_token_sum_norm:
        if norm_tokens is None:
            raise ValueError(
                "norm_tokens is null, but aggregation=sequence_mean_token_sum_norm divides by it; "
                "set it to data.max_response_length, and keep that value if the length changes later"
            )
        per_token = per_token / norm_tokens

    return per_token.sum() / max(denominator, 1.0)
