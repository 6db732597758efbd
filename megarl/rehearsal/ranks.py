"""Choose which ranks of a layout are simulated, and check their records for hangs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from megarl.config.schema import ParallelConfig
from megarl.machine.wording import counted
from megarl.rehearsal.order import deadlock
from megarl.rehearsal.record import POINT_TO_POINT, Collective, RankRecord

# Megatron's name of the groups.
_DATA_PARALLEL = "DATA_PARALLEL"
_SUMS = ("reduce_scatter", "all_reduce")


def distinct_ranks(parallel: ParallelConfig) -> list[int]:
    """Return the first rank of the first, the second and the last pipeline stage.

    The second stage is the fullest of those in the middle. Ranks of one stage hold and do the same.
    """
    stages = parallel.pipeline_parallel_size
    return [stage * parallel.stage_size for stage in sorted({0, min(1, stages - 1), stages - 1})]


def chosen_ranks(text: str, parallel: ParallelConfig) -> list[int]:
    """Parse `--ranks`: `distinct`, `all`, or comma-separated numbers.

    Raises:
        ValueError: The text is something else, or a rank does not exist.
    """
    if text == "distinct":
        return distinct_ranks(parallel)
    if text == "all":
        return list(range(parallel.world_size))
    names = text.split(",")
    if not all(name.strip().isdigit() for name in names):
        raise ValueError(f"--ranks {text}: must be distinct, all, or comma-separated ranks such as 0,8")
    ranks = sorted({int(name) for name in names})

    if ranks[-1] >= parallel.world_size:
        raise ValueError(
            f"--ranks {text}: the role has {counted(parallel.world_size, 'rank')}, from 0 to "
            f"{parallel.world_size - 1}"
        )

    return ranks


def hangs(records: Sequence[RankRecord]) -> list[str]:
    """Return one line for each hang.

    Members of a group must make the same calls in the same order, with equal dtypes and sizes, and what a
    rank sends must be what its peer receives. There is one line for each group or pair, about its first call
    that differs. If there is none, there is one line if ranks deadlock because their orders differ between
    groups (order.py).
    """
    sequences: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = defaultdict(dict)
    # Collect what each rank calls in each group, in order.
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
        # One difference is enough: later ones follow from the first.
        for other in members[1:]:
            problem = _difference(first, calls.get(first, []), other, calls.get(other, []))
            if problem is not None:
                problems.append(f"a hang in {name} of ranks {_shown(ranks)}: {problem}")
                break

    # The order between groups is only meaningful if the calls agree within each group.
    if not problems and (problem := deadlock(records)) is not None:
        problems.append(problem)
    return problems


def rounded_sums(records: Sequence[RankRecord]) -> list[str]:
    """Return one line for each place that sums gradients over data-parallel ranks not in float32.

    Such a sum would be rounded to its dtype.
    """
    problems = {
        f"gradients are summed over {counted(len(call.ranks), 'data-parallel rank')} in {call.dtype}, not "
        "in float32, "
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
            return f"call {number} of rank {one} is {_told(mine)}, but of rank {other} {_told(theirs)}"
    return None


def _agree(one: int, mine: Collective, other: int, theirs: Collective) -> bool:
    """Return whether two records describe the same call.

    The sizes of an all_to_all differ, but what one rank sends to the other must be what that one receives.
    """
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
