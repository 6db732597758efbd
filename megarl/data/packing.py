"""Which row goes to which data-parallel rank and micro-batch: a pure plan, made before anything runs.

Packed rows cost no padding, so what a rank has to do follows from its rows' lengths alone. A plan gives every rank the same
number of micro-batches (the ranks meet in collectives and in the pipeline), each row once, and about the same work per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The length at which a layer's causal attention costs as much as its matrices: 2 L^2 H = 24 H^2 L floating-point operations
# at L = 12 H, taken for H = 2048. It sets how much long rows weigh, not whether a plan is valid.
BALANCED_LENGTH = 24576


def row_cost(lengths: np.ndarray) -> np.ndarray:
    """The work of a row of so many tokens, in tokens of a short row: L + L^2 / BALANCED_LENGTH (linear layers, attention)."""
    return lengths + lengths.astype(np.float64) ** 2 / BALANCED_LENGTH


@dataclass(frozen=True, kw_only=True)
class MicroBatchRows:
    """DataRow numbers of the batch. A filler repeats one row, so that a rank has something to run: its loss weighs zero."""

    rows: tuple[int, ...]
    is_filler: bool = False


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    micro_batches: tuple[MicroBatchRows, ...]

    @property
    def rows(self) -> list[int]:
        """The rank's rows of the batch in the order in which it runs them, fillers included."""
        return [row for micro_batch in self.micro_batches for row in micro_batch.rows]

    @property
    def local_micro_batches(self) -> list[range]:
        """For each micro-batch, the positions of its rows in `rows`."""
        bounds = np.cumsum([0, *(len(micro_batch.rows) for micro_batch in self.micro_batches)]).tolist()
        return [range(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """`ranks[r].micro_batches[m]`: what data-parallel rank r runs as its micro-batch m."""

    ranks: tuple[RankPlan, ...]
    num_rows: int

    @property
    def num_micro_batches(self) -> int:
        """Of each rank."""
        return len(self.ranks[0].micro_batches)

    def restore_order(self) -> list[int]:
        """Positions of rows 0, 1, ... in the ranks' outputs, concatenated in the order of ranks: `outputs[positions]` is in
        the order of the batch, with the fillers' outputs dropped."""
        positions = [-1] * self.num_rows
        position = 0
        for rank in self.ranks:
            for micro_batch in rank.micro_batches:
                for row in micro_batch.rows:
                    if not micro_batch.is_filler:
                        positions[row] = position
                    position += 1
        assert -1 not in positions
        return positions


def plan_micro_batches(
    lengths: Sequence[int], dp_size: int, *, sequences: int | None = None, max_tokens: int | None = None, multiple_of: int = 1
) -> BatchPlan:
    """A plan for rows of `lengths` tokens over `dp_size` ranks; the same arguments give the same plan.

    Exactly one limit of a micro-batch is given: `sequences` rows, or `max_tokens` tokens. The number of micro-batches of a rank
    is a multiple of `multiple_of` (an interleaved pipeline needs a multiple of its stages). The fewest micro-batches that
    longest-first packing finds are used, and rows are spread over them by cost.

    Raises ValueError for a row that alone is over the token budget, for no rows, and for limits that make no sense.
    """
    row_lengths = np.asarray(lengths, dtype=np.int64)
    _check(row_lengths, dp_size, sequences, max_tokens, multiple_of)
    num_rows, cost = len(row_lengths), row_cost(row_lengths)
    order = np.lexsort((np.arange(num_rows), -row_lengths))  # longest first, ties in the order of the batch
    if sequences is not None:
        weights, capacity = np.ones(num_rows, dtype=np.int64), sequences
        packed = [order[start : start + capacity].tolist() for start in range(0, num_rows, capacity)]
    else:
        assert max_tokens is not None
        weights, capacity = row_lengths, max_tokens
        packed = _first_fit(order, weights, capacity)
    num_micro_batches = _round_up(_ceil_divide(len(packed), dp_size), multiple_of)
    hands = _spread(order, weights, capacity, cost, dp_size, num_micro_batches)
    if hands is None:
        hands = _deal(_widen(packed, cost, num_micro_batches * dp_size), cost, dp_size, num_micro_batches)
    filler = MicroBatchRows(rows=(int(order[-1]),), is_filler=True)
    return BatchPlan(ranks=tuple(_rank_plan(hand, cost, filler) for hand in hands), num_rows=num_rows)


def _check(lengths: np.ndarray, dp_size: int, sequences: int | None, max_tokens: int | None, multiple_of: int) -> None:
    if (sequences is None) == (max_tokens is None):
        raise ValueError(f"micro_batch: give exactly one of sequences and max_tokens, got sequences={sequences}, max_tokens={max_tokens}")
    for name, value in (("dp_size", dp_size), ("sequences", sequences), ("max_tokens", max_tokens), ("multiple_of", multiple_of)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if len(lengths) == 0:
        raise ValueError("a batch without rows cannot be cut into micro-batches")
    if lengths.min() < 1:
        row = int(lengths.argmin())
        raise ValueError(f"row {row} has length {lengths[row]}; a row holds at least one token")
    if max_tokens is not None and lengths.max() > max_tokens:
        row = int(lengths.argmax())
        raise ValueError(
            f"row {row} has {lengths[row]} tokens, more than micro_batch.max_tokens={max_tokens} "
            f"({int((lengths > max_tokens).sum())} of {len(lengths)} rows are over it); "
            "set max_tokens to at least the longest prompt plus response"
        )


def _ceil_divide(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(value: int, multiple: int) -> int:
    return _ceil_divide(value, multiple) * multiple


def _first_fit(order: np.ndarray, weights: np.ndarray, capacity: int) -> list[list[int]]:
    """First-fit decreasing: bins within `capacity`, at most 11/9 of the fewest possible plus 6/9 (Dosa 2007)."""
    room = np.full(len(order), capacity, dtype=np.int64)  # as many bins as rows always suffice
    bins: list[list[int]] = []
    for row in order.tolist():
        first = int(np.argmax(room[: len(bins) + 1] >= weights[row]))
        if first == len(bins):
            bins.append([])
        bins[first].append(row)
        room[first] -= weights[row]
    return bins


def _spread(
    order: np.ndarray, weights: np.ndarray, capacity: int, cost: np.ndarray, dp_size: int, num_micro_batches: int
) -> list[list[list[int]]] | None:
    """Rows of [rank][micro-batch]: longest first, each row to the rank with the least work that has room for it, and there into
    the micro-batch with the least work (LPT). None where a row at last fits nowhere."""
    room = np.full((dp_size, num_micro_batches), capacity, dtype=np.int64)
    load = np.zeros((dp_size, num_micro_batches))
    hands: list[list[list[int]]] = [[[] for _ in range(num_micro_batches)] for _ in range(dp_size)]
    for row in order.tolist():
        has_room = room >= weights[row]
        if not has_room.any():
            return None
        rank = int(np.argmin(np.where(has_room.any(axis=1), load.sum(axis=1), np.inf)))
        target = int(np.argmin(np.where(has_room[rank], load[rank], np.inf)))
        hands[rank][target].append(row)
        room[rank, target] -= weights[row]
        load[rank, target] += cost[row]
    _fill_empty(hands)
    return hands


def _fill_empty(hands: list[list[list[int]]]) -> None:
    """Moves a short row from a micro-batch of several into each empty one, as far as there are any: cheaper than a filler."""
    full = [rows for hand in hands for rows in hand if len(rows) > 1]
    for rows in (rows for hand in hands for rows in hand if not rows):
        if not full:
            return
        giver = max(full, key=len)
        rows.append(giver.pop())  # the shortest of its micro-batch
        full = [rows for rows in full if len(rows) > 1]


def _widen(bins: list[list[int]], cost: np.ndarray, num_bins: int) -> list[list[int]]:
    """Splits the costliest bins of several rows until there are `num_bins`, or no bin can be split."""
    bins = [list(rows) for rows in bins]
    while len(bins) < num_bins:
        costliest = max((rows for rows in bins if len(rows) > 1), key=lambda rows: float(cost[rows].sum()), default=None)
        if costliest is None:
            break
        bins.append(costliest[1::2])
        del costliest[1::2]
    return bins


def _deal(bins: list[list[int]], cost: np.ndarray, dp_size: int, num_micro_batches: int) -> list[list[list[int]]]:
    """Rows of [rank][micro-batch]: costliest bin first, to the rank with the least work that still has a place."""
    load = np.zeros(dp_size)
    hands: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for rows in sorted(bins, key=lambda rows: -float(cost[rows].sum())):
        has_place = np.array([len(hand) < num_micro_batches for hand in hands])
        rank = int(np.argmin(np.where(has_place, load, np.inf)))
        hands[rank].append(rows)
        load[rank] += cost[rows].sum()
    return [hand + [[]] * (num_micro_batches - len(hand)) for hand in hands]


def _rank_plan(hand: list[list[int]], cost: np.ndarray, filler: MicroBatchRows) -> RankPlan:
    """Costliest micro-batch first, so that one too large for the memory fails at once; fillers for the empty ones, last."""
    by_cost = sorted(hand, key=lambda rows: -float(cost[rows].sum()))
    return RankPlan(micro_batches=tuple(MicroBatchRows(rows=tuple(sorted(rows))) if rows else filler for rows in by_cost))
