"""Assigns rows to data-parallel ranks and micro-batches.

The result is a pure plan, made before anything runs.

Packed rows need no padding, so the work of a rank follows from the lengths of its rows alone. A plan assigns
every rank the same number of micro-batches (the ranks synchronize in collectives and in the pipeline), each
row once, and about the same work per rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from megarl.config.batch_arithmetic import padded_length, rounded_up
from megarl.machine.errors import counted

# The length at which a layer's causal attention costs as much as its matrices: 2 L^2 H = 24 H^2 L
# floating-point operations at L = 12 H, for H = 2048. It determines the weight of long rows, not whether a
# plan is valid.
BALANCED_LENGTH = 24576
# Ranks count as balanced if their work is within this factor of the mean. The second constant limits the
# number of rows moved per rank to balance them.
_EVEN = 1.005
_MOVES_PER_RANK = 8


def row_cost(lengths: np.ndarray) -> np.ndarray:
    """Return the work of rows of these lengths, in tokens of a short row.

    The work is L + L^2 / BALANCED_LENGTH, for the linear layers and attention.
    """
    return lengths + lengths.astype(np.float64) ** 2 / BALANCED_LENGTH


@dataclass(frozen=True, kw_only=True)
class ReplicaMicroBatches:
    """The micro-batches of a rank.

    A filler repeats one row, so that a rank has something to run; its loss has zero weight.

    Attributes:
        micro_batches: The row numbers of each in the batch.
        num_fillers: How many of them are fillers, which are the last ones.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    num_fillers: int = 0

    def expanded(self, rows_together: int) -> ReplicaMicroBatches:
        """Return the plan of rows, given a plan of units of `rows_together` consecutive rows."""
        return replace(
            self,
            micro_batches=tuple(
                tuple(unit * rows_together + row for unit in units for row in range(rows_together))
                for units in self.micro_batches
            ),
        )

    @property
    def rows(self) -> list[int]:
        """The rank's rows of the batch in the order in which it runs them, including fillers."""
        return list(chain.from_iterable(self.micro_batches))

    @property
    def is_filler(self) -> list[bool]:
        """Whether each of `rows` belongs to a filler."""
        first = len(self.micro_batches) - self.num_fillers
        return [number >= first for number, rows in enumerate(self.micro_batches) for _ in rows]

    @property
    def local_micro_batches(self) -> list[range]:
        """The positions of each micro-batch's rows in `rows`."""
        bounds = np.cumsum([0, *map(len, self.micro_batches)]).tolist()
        return [range(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]


@dataclass(frozen=True, kw_only=True)
class MicroBatchPlan:
    """The plan of all ranks: data-parallel rank r runs `ranks[r].micro_batches[m]` as its micro-batch m."""

    ranks: tuple[ReplicaMicroBatches, ...]
    num_rows: int

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of each rank."""
        return len(self.ranks[0].micro_batches)

    def restore_order(self) -> list[int]:
        """Return the positions of rows 0, 1, ... in the outputs of the ranks, concatenated in rank order.

        `outputs[positions]` is in the order of the batch, without the outputs of fillers.
        """
        positions = [-1] * self.num_rows
        rows = [pair for rank in self.ranks for pair in zip(rank.rows, rank.is_filler, strict=True)]

        # Outputs of fillers occupy positions too, but belong to no row.
        for position, (row, is_filler) in enumerate(rows):
            if not is_filler:
                positions[row] = position

        assert -1 not in positions
        return positions


# The number of a row's prompt, which is the same for rows with the same prompt, and its length in tokens.
type RowPrompt = tuple[int, int]


class _Sizes(NamedTuple):
    """The sizes of all rows.

    Attributes:
        group: The group of each row: the rows that share its prompt, or the row alone.
        own: The tokens, or rows, that a row adds to a micro-batch.
        own_cost: The work that a row adds.
        prompt: The tokens that the prompt of its group adds, once.
        prompt_cost: The work that the prompt of its group adds, once.
    """

    group: list[int]
    own: list[int]
    own_cost: list[float]
    prompt: list[int]
    prompt_cost: list[float]

    def joined(self, rows_together: int) -> _Sizes:
        """Return the sizes of units of consecutive rows, each with its distinct prompts."""
        units = [range(first, first + rows_together) for first in range(0, len(self.own), rows_together)]
        # Rows with the same prompt share it within a unit, so it counts once.
        firsts = [list({self.group[row]: row for row in unit}.values()) for unit in units]

        return _Sizes(
            group=list(range(len(units))),
            own=[
                sum(self.own[row] for row in unit) + sum(self.prompt[row] for row in first)
                for unit, first in zip(units, firsts, strict=True)
            ],
            own_cost=[self.work(unit) for unit in units],
            prompt=[0] * len(units),
            prompt_cost=[0.0] * len(units),
        )

    def weight(self, rows: Sequence[int]) -> int:
        """Return the size of rows of one group."""
        return sum(self.own[row] for row in rows) + self.prompt[rows[0]]

    def cost(self, rows: Sequence[int]) -> float:
        """Return the work of rows of one group."""
        return sum(self.own_cost[row] for row in rows) + self.prompt_cost[rows[0]]

    def work(self, rows: Sequence[int]) -> float:
        """Return the work of a micro-batch."""
        # Rows of a group share their prompt.
        prompts = {self.group[row]: self.prompt_cost[row] for row in rows}
        return sum(self.own_cost[row] for row in rows) + sum(prompts.values())


def plan_micro_batches(
    lengths: Sequence[int],
    dp_size: int,
    *,
    sequences: int | None = None,
    max_tokens: int | None = None,
    multiple_of: int = 1,
    context_parallel_size: int = 1,
    prompts: Sequence[RowPrompt] | None = None,
    rows_together: int = 1,
) -> MicroBatchPlan:
    """Plan the micro-batches of rows over data-parallel ranks. The plan is deterministic.

    Args:
        lengths: The tokens of each row.
        dp_size: The number of data-parallel ranks.
        sequences: The limit of a micro-batch in rows. Exactly one of `sequences` and `max_tokens` is given.
        max_tokens: The limit of a micro-batch in tokens per rank.
        multiple_of: The number of micro-batches of a rank is a multiple of this (an interleaved pipeline
            needs a multiple of its stages).
        context_parallel_size: The number of context-parallel ranks that share the rows of a data-parallel
            rank.
        prompts: The prompt of each row, if the rows of a micro-batch share the tokens of their prompt. Rows
            with the same prompt stay together as long as ranks have about the same work and micro-batches
            have room; otherwise they are distributed.
        rows_together: The number of consecutive rows that one loss reads, such as 2 for pairs of answers.
            They stay in one micro-batch, whatever the prompts of other rows.

    Raises:
        ValueError: A row alone exceeds the token limit, there are no rows, or the limits are invalid.
    """
    row_lengths = np.asarray(lengths, dtype=np.int64)
    _check(row_lengths, dp_size, sequences, max_tokens, multiple_of)
    sizes = _sizes(row_lengths, prompts, context_parallel_size, by_tokens=max_tokens is not None)
    if rows_together > 1:
        _check_together(len(row_lengths), rows_together, sequences)
        sizes = sizes.joined(rows_together)
        row_lengths = row_lengths.reshape(-1, rows_together).sum(axis=1)
    if max_tokens is not None:
        _check_room(row_lengths, sizes, max_tokens, context_parallel_size, rows_together)
    capacity = max_tokens * context_parallel_size if max_tokens is not None else sequences
    assert capacity is not None
    # Distribute the rows over the data-parallel replicas, each with about the same work.
    hands = _over_ranks(sizes, dp_size)
    # The tightest packing of the fullest replica determines the number of micro-batches for all.
    packed = [_over_micro_batches(hand, sizes, capacity, 1, spread=False) for hand in hands]
    num_micro_batches = rounded_up(max(map(len, packed)), multiple_of)
    cut = []

    for hand, tight in zip(hands, packed, strict=True):
        micro_batches = _over_micro_batches(hand, sizes, capacity, num_micro_batches, spread=True)
        # If spreading needs more micro-batches than packing, use the packing.
        if len(micro_batches) > num_micro_batches:
            micro_batches = tight
        cut.append([*micro_batches, *([] for _ in range(num_micro_batches - len(micro_batches)))])

    # All replicas run the same number of micro-batches: an empty one gets a row, or else a filler.
    _fill_empty(cut)
    # The shortest row is the cheapest filler.
    filler = int(np.lexsort((-np.arange(len(row_lengths)), row_lengths))[0])
    ranks = tuple(_rank_plan(hand, sizes, filler) for hand in cut)
    if rows_together > 1:
        ranks = tuple(rank.expanded(rows_together) for rank in ranks)
    return MicroBatchPlan(ranks=ranks, num_rows=len(lengths))


def _sizes(
    lengths: np.ndarray, prompts: Sequence[RowPrompt] | None, context_parallel_size: int, *, by_tokens: bool
) -> _Sizes:
    rows = np.arange(len(lengths))
    # Without shared prompts, every row is its own group.
    group, prompt = (
        (rows, np.zeros_like(lengths)) if prompts is None else np.asarray(prompts, dtype=np.int64).T
    )
    prompt_cost = row_cost(prompt)
    own = [1] * len(lengths)
    of_prompt = [0] * len(lengths)

    # A token limit includes padding; a row limit counts each row as 1.
    if by_tokens:
        own, of_prompt = (
            [padded_length(length, context_parallel_size) for length in tokens.tolist()]
            for tokens in (lengths - prompt, prompt)
        )

    # Attention to the prompt is work of the row: its cost is that of the whole row minus that of the prompt.
    own_cost = row_cost(lengths) - prompt_cost
    return _Sizes(group.tolist(), own, own_cost.tolist(), of_prompt, prompt_cost.tolist())


def _check(
    lengths: np.ndarray, dp_size: int, sequences: int | None, max_tokens: int | None, multiple_of: int
) -> None:
    if (sequences is None) == (max_tokens is None):
        raise ValueError(
            f"micro_batch: give exactly one of sequences and max_tokens, got sequences={sequences}, "
            f"max_tokens={max_tokens}"
        )

    for name, value in (
        ("dp_size", dp_size),
        ("sequences", sequences),
        ("max_tokens", max_tokens),
        ("multiple_of", multiple_of),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")

    if len(lengths) == 0:
        raise ValueError("a batch without rows cannot be split into micro-batches")
    if lengths.min() < 1:
        row = int(lengths.argmin())
        raise ValueError(f"row {row} has length {lengths[row]}; a row contains at least one token")


def _check_together(num_rows: int, rows_together: int, sequences: int | None) -> None:
    if num_rows % rows_together:
        raise ValueError(
            f"{counted(num_rows, 'row')} cannot be divided into units of rows_together={rows_together}"
        )
    if sequences is not None and sequences < rows_together:
        raise ValueError(
            f"micro_batch.sequences={sequences} has no room for {rows_together} rows that stay together; set "
            f"it to {rows_together} or more"
        )


def _check_room(
    lengths: np.ndarray, sizes: _Sizes, max_tokens: int, context_parallel_size: int, rows_together: int
) -> None:
    needed = np.asarray(sizes.own) + np.asarray(sizes.prompt)
    over = needed > max_tokens * context_parallel_size

    if over.any():
        row = int(needed.argmax())
        ranks = f" x context_parallel_size={context_parallel_size}" if context_parallel_size > 1 else ""
        unit, units, longest = "row", "rows", "prompt plus response"
        if rows_together > 1:
            unit, units, longest = "unit", "units", f"{rows_together} rows that stay together"
        raise ValueError(
            f"{unit} {row} has {counted(lengths[row], 'token')}, more than "
            f"micro_batch.max_tokens={max_tokens}{ranks} ({int(over.sum())} of {len(lengths)} {units} "
            "exceed it); set max_tokens to at least the "
            f"longest {longest}" + (", divided by the ranks that share it" if ranks else "")
        )


def _over_ranks(sizes: _Sizes, dp_size: int) -> list[dict[int, list[int]]]:
    """Distribute the rows over ranks and return [rank][group] -> rows, longest first.

    The most expensive group is assigned first, to the rank with the least work (LPT). Then the rank with the
    most work moves some rows of a group, which duplicates their prompt, to the rank with the least work,
    until no move improves the balance.
    """
    groups: dict[int, list[int]] = {}
    for row in sorted(range(len(sizes.own)), key=lambda row: -sizes.own_cost[row]):
        groups.setdefault(sizes.group[row], []).append(row)
    costs = {group: sizes.cost(rows) for group, rows in groups.items()}
    load = np.zeros(dp_size)
    hands: list[dict[int, list[int]]] = [{} for _ in range(dp_size)]

    # Assign whole groups, so that each prompt is computed on one replica only.
    for group in sorted(groups, key=lambda group: -costs[group]):
        rank = int(load.argmin())
        hands[rank][group] = groups[group]
        load[rank] += costs[group]

    # Move single rows to balance where whole groups are too coarse.
    for _ in range(_MOVES_PER_RANK * dp_size):
        giver = int(load.argmax())
        taker = int(load.argmin())
        if load[giver] <= load.mean() * _EVEN:
            break
        moves = (
            _move(rows, sizes, load[giver], load[taker], group in hands[taker])
            for group, rows in hands[giver].items()
        )
        moved, giver_load, taker_load = min(moves, key=lambda move: max(move[1], move[2]))
        # No move would reduce the maximum.
        if max(giver_load, taker_load) >= load[giver]:
            break
        group = sizes.group[moved[0]]
        left = set(hands[giver][group]) - set(moved)
        hands[giver][group] = [row for row in hands[giver][group] if row in left]
        if not hands[giver][group]:
            del hands[giver][group]
        # `_move` and `_take_within` expect the longest row first.
        joined = [*hands[taker].get(group, []), *moved]
        hands[taker][group] = sorted(joined, key=lambda row: -sizes.own_cost[row])
        load[giver] = giver_load
        load[taker] = taker_load

    return hands


def _move(
    rows: list[int], sizes: _Sizes, giver: float, taker: float, has_prompt: bool
) -> tuple[list[int], float, float]:
    """Choose the rows of a group to move between ranks, longest first.

    As many rows as possible are chosen such that the giver keeps at least as much work as the taker.

    Returns:
        The rows, which may be none, and the work of the giver and the taker afterwards.
    """
    prompt_cost = sizes.prompt_cost[rows[0]]
    taker += 0.0 if has_prompt else prompt_cost
    chosen = []

    for row in rows:
        cost = sizes.own_cost[row]
        if giver - cost >= taker + cost:
            chosen.append(row)
            giver = giver - cost
            taker = taker + cost

    # A giver that keeps no row of the group no longer computes its prompt.
    if not chosen:
        return [], np.inf, np.inf
    return chosen, giver - prompt_cost * (len(chosen) == len(rows)), taker


def _over_micro_batches(
    hand: dict[int, list[int]], sizes: _Sizes, capacity: int, num_micro_batches: int, *, spread: bool
) -> list[list[int]]:
    """Distribute the rows of a rank over micro-batches.

    The most expensive group is placed first. With `spread`, it goes into the micro-batch with the least work
    that has room for it, otherwise into the first one that has room, for as few as possible (first-fit
    decreasing). A group that fits nowhere is split: the emptiest micro-batch takes as many rows as fit,
    and so on. If none fits, a micro-batch is added.
    """
    most = sum(map(len, hand.values())) + num_micro_batches  # one micro-batch per row always suffices
    room = np.full(most, capacity, dtype=np.int64)
    load = np.zeros(most)
    micro_batches: list[list[int]] = [[] for _ in range(num_micro_batches)]

    for group in sorted(hand, key=lambda group: -sizes.cost(hand[group])):
        left = list(hand[group])
        weight = sizes.weight(left)
        # A group that fits stays together; otherwise the emptiest micro-batches share it.
        while left:
            count = len(micro_batches)
            has_room = room[:count] >= weight
            if has_room.any():
                target = (
                    int(np.argmin(np.where(has_room, load[:count], np.inf)))
                    if spread
                    else int(has_room.argmax())
                )
                taken = left
                left = []
            else:
                target = int(room[:count].argmax())
                taken = _take_within(left, sizes, int(room[target]))
                if not taken:
                    micro_batches.append([])
                    continue
            micro_batches[target] += taken
            room[target] -= sizes.weight(taken)
            load[target] += sizes.cost(taken)
            # The remaining rows still need their prompt, so its weight stays.
            weight -= sum(sizes.own[row] for row in taken)

    return micro_batches


def _take_within(rows: list[int], sizes: _Sizes, room: int) -> list[int]:
    """Remove the rows that fit together with their prompt from the rows of a group, longest first."""
    room -= sizes.prompt[rows[0]]
    taken: list[int] = []
    place = 0

    # Rows are sorted by length, so a binary search finds the next one that fits.
    while (place := bisect_left(rows, -room, lo=place, key=lambda row: -sizes.own[row])) < len(rows):
        row = rows.pop(place)
        taken.append(row)
        room -= sizes.own[row]

    return taken


def _fill_empty(hands: list[list[list[int]]]) -> None:
    """Move a row from a micro-batch with several rows into each empty one, as long as there are any.

    This costs less than a filler.
    """
    full = [rows for hand in hands for rows in hand if len(rows) > 1]
    for rows in (rows for hand in hands for rows in hand if not rows):
        if not full:
            return
        # The cheapest group was added last, and its shortest row comes last.
        rows.append(max(full, key=len).pop())
        full = [rows for rows in full if len(rows) > 1]


def _rank_plan(hand: list[list[int]], sizes: _Sizes, filler: int) -> ReplicaMicroBatches:
    """Order micro-batches by cost, most expensive first, with fillers for empty ones last.

    A micro-batch that does not fit into memory then fails immediately.
    """
    by_cost = sorted(hand, key=lambda rows: -sizes.work(rows))
    return ReplicaMicroBatches(
        micro_batches=tuple(tuple(sorted(rows)) or (filler,) for rows in by_cost),
        num_fillers=by_cost.count([]),
    )
