"""Which ranks of a layout are rehearsed, and whether those that were would wait for each other for ever.
Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from megarl.config.schema import ParallelConfig
from megarl.rehearsal.order import deadlock
from megarl.rehearsal.record import POINT_TO_POINT, Collective, RankRecord

# as Megatron calls the groups
_DATA_PARALLEL = "DATA_PARALLEL"
_SUMS = ("reduce_scatter", "all_reduce")


def distinct_ranks(parallel: ParallelConfig) -> list[int]:
    """The first rank of the first pipeline stage, of the second, which is the fullest of those in the middle,
    and of the
    last: ranks of a stage hold as much and do the same."""
    stages = parallel.pipeline_parallel_size
    return [stage * parallel.stage_size for stage in sorted({0, min(1, stages - 1), stages - 1})]


def chosen_ranks(text: str, parallel: ParallelConfig) -> list[int]:
    """`distinct`, `all`, or numbers with commas between them. Raises ValueError for anything else and for a
    rank that there is not."""
    if text == "distinct":
        return distinct_ranks(parallel)
    if text == "all":
        return list(range(parallel.world_size))
    names = text.split(",")
    if not all(name.strip().isdigit() for name in names):
        raise ValueError(f"--ranks {text}: give distinct, all, or ranks with commas between them, as 0,8")
    ranks = sorted({int(name) for name in names})

    if ranks[-1] >= parallel.world_size:
        raise ValueError(
            f"--ranks {text}: the role has {parallel.world_size} ranks, the last of them "
            f"{parallel.world_size - 1}"
        )

    return ranks


def hangs(records: Sequence[RankRecord]) -> list[str]:
    """Where members of a group would not make the same calls in the same order, of the same element type and
    size; and where what a rank sends is not what its peer receives. One line for each group and pair, of its
    first call that differs. Where there is none, one line if ranks wait for each other because their orders
    differ between groups (order.py)."""
    sequences: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    # Collect what each rank calls in each group, in its order.
    for record in records:
        for phase in record.phases:
            for call in phase.collectives:
                message = call.kind in POINT_TO_POINT
                group = (f"messages in {call.group}" if message else call.group, call.ranks)
                sequences[group].setdefault(record.rank, []).append(call)

    rehearsed = {record.rank for record in records}
    problems = []

    for (name, ranks), calls in sequences.items():
        members = [rank for rank in ranks if rank in rehearsed]
        first = members[0]
        # One difference is enough: those after it follow from the first.
        for other in members[1:]:
            problem = _difference(first, calls.get(first, []), other, calls.get(other, []))
            if problem is not None:
                problems.append(f"a hang in {name} of ranks {_shown(ranks)}: {problem}")
                break

    # The order between groups is only meaningful where the calls agree within each.
    if not problems and (problem := deadlock(records)) is not None:
        problems.append(problem)
    return problems


def rounded_sums(records: Sequence[RankRecord]) -> list[str]:
    """Where gradients are summed over data-parallel ranks in another type than float32: each sum would be
    rounded to it. One line for each place."""
    problems = {
        f"gradients are summed over {len(call.ranks)} data-parallel ranks in {call.dtype}, not in float32, "
        f"at {call.place}": None
        for record in records
        for phase in record.phases
        for call in phase.collectives
        if phase.name.startswith("train")
        and call.group.startswith(_DATA_PARALLEL)
        and call.kind in _SUMS
        and call.dtype != "float32"
    }
    return list(problems)


def _difference(one: int, calls: list[Collective], other: int, others: list[Collective]) -> str | None:
    for number, (mine, theirs) in enumerate(zip_longest(calls, others), start=1):
        if mine is None or theirs is None or not _agree(one, mine, other, theirs):
            return f"call {number} of rank {one} is {_told(mine)}, of rank {other} {_told(theirs)}"
    return None


def _agree(one: int, mine: Collective, other: int, theirs: Collective) -> bool:
    """Whether they are one call of both ranks. Of an all_to_all each has another size, but what goes from one
    to the other is the same."""
    if _what(mine) != _what(theirs):
        return False
    if not mine.sent:
        return mine.elements == theirs.elements
    # In an all_to_all, what one rank sends to the other must be what that one receives.
    first = mine.ranks.index(one)
    second = mine.ranks.index(other)

    return mine.sent[second] == theirs.received[first] and mine.received[second] == theirs.sent[first]


def _what(call: Collective) -> tuple[str, str]:
    return "message" if call.kind in POINT_TO_POINT else call.kind, call.dtype


def _told(call: Collective | None) -> str:
    return "none" if call is None else f"{call.kind} of {call.elements:,} {call.dtype} at {call.place}"


def _shown(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
