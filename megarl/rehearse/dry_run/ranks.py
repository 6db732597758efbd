"""Choose which ranks of a layout are simulated, and check their records for hangs. Pure.

Ranks whose calls agree within each group may still wait for each other, because the order of their calls
differs between groups. The model follows NCCL on devices. A call starts once all previous calls of its
group have ended and the device has reached it, and ends once all members have started it. The device
continues, and blocks where it waits for a call. All calls of a group, including messages, run one after
another, because each group has a single communicator, which is created with its device; the messages of one
batch run at the same time. A message ends when both sender and receiver have reached it, as large messages
do. Ranks that were not simulated are assumed to reach every call.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import zip_longest

from megarl.config.schema import ParallelConfig
from megarl.machine.errors import counted
from megarl.rehearse.dry_run.record import POINT_TO_POINT, Await, Collective, RankRecord


def distinct_ranks(parallel: ParallelConfig) -> list[int]:
    """Return the first rank of the first, the second and the last pipeline stage.

    The second stage is the fullest of those in the middle. If they have different numbers of layers, the
    first one of each number is included. Ranks of one stage hold and do the same.
    """
    return [stage * parallel.stage_size for stage in sorted(set(parallel.representatives()))]


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
    groups (`deadlock`).
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
    problems = (
        f"gradients are summed over {counted(len(call.ranks), 'data-parallel rank')} in {call.dtype}, not "
        "in float32, "
        f"at {call.place}"
        for record in records
        for phase in record.phases
        for call in phase.collectives
        if phase.name.startswith("train")
        and call.group.startswith("DATA_PARALLEL")  # Megatron's name of the groups
        and call.kind in ("reduce_scatter", "all_reduce")
        and call.dtype != "float32"
    )
    return list(dict.fromkeys(problems))


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


class _Rank:
    def __init__(self, record: RankRecord) -> None:
        self.calls = [call for phase in record.phases for call in phase.collectives]
        self.awaits: deque[Await] = deque(each for phase in record.phases for each in phase.awaits)
        self.num_begun = 0
        self.ended: set[int] = set()
        self.queues: dict[str, deque[int]] = defaultdict(deque)  # by group: calls that have not ended

    def advance(self) -> None:
        """Continue to where the device waits for a call that has not ended, or to the end."""
        while True:
            while self.awaits and self.awaits[0].num_calls == self.num_begun:
                if self.awaits[0].call not in self.ended:
                    return
                self.awaits.popleft()
            if self.num_begun == len(self.calls):
                return
            self.queues[self.calls[self.num_begun].group].append(self.num_begun)
            self.num_begun += 1

    def at_work(self, group: str) -> list[int]:
        """Return the first call of the group that has not ended, with the others of its batch."""
        queue = self.queues[group]
        if not queue:
            return []
        batch = self.calls[queue[0]].batch

        return (
            [call for call in queue if self.calls[call].batch == batch] if batch is not None else [queue[0]]
        )

    def same(self, group: str, call: Collective) -> int | None:
        """Return the number of the rank's own call that matches another rank's, if it is running."""
        return next((number for number in self.at_work(group) if _meet(self.calls[number], call)), None)

    def end(self, number: int) -> None:
        self.ended.add(number)
        self.queues[self.calls[number].group].remove(number)

    def blocking_call(self, group: str | None) -> int | None:
        """Return the call at which the rank blocks, in the group or at all; None if it has finished."""
        if group is None or not self.queues[group]:
            group = (
                self.calls[self.awaits[0].call].group
                if self.awaits
                else next(filter(self.queues.get, self.queues), None)
            )
        return None if group is None else self.queues[group][0]


def _meet(mine: Collective, theirs: Collective) -> bool:
    return mine.ranks == theirs.ranks and (mine.kind in POINT_TO_POINT) == (theirs.kind in POINT_TO_POINT)


def deadlock(records: Sequence[RankRecord]) -> str | None:
    """Return one line that describes a deadlock, with the source lines of all ranks; None if there is none.

    Args:
        records: Records whose calls agree within each group.
    """
    ranks = {record.rank: _Rank(record) for record in records}
    moved = True

    # Advance all ranks until nothing else can end.
    while moved:
        moved = False
        for mine in ranks.values():
            mine.advance()
            for group in list(mine.queues):
                for number in mine.at_work(group):
                    moved |= _end_where_all_are_there(ranks, group, mine.calls[number])

    # A rank that still waits is part of a deadlock, or waits for one.
    waiting = [number for number, rank in ranks.items() if rank.blocking_call(None) is not None]
    return _described_cycle(ranks, waiting[0]) if waiting else None


def _end_where_all_are_there(ranks: dict[int, _Rank], group: str, call: Collective) -> bool:
    numbers = {member: ranks[member].same(group, call) for member in call.ranks if member in ranks}
    # A collective ends only when every simulated member has reached it.
    if None in numbers.values():
        return False

    for member, number in numbers.items():
        assert number is not None
        ranks[member].end(number)

    return True


def _described_cycle(ranks: dict[int, _Rank], first: int) -> str:
    """Describe the ranks that wait for each other, without those that only lead to the cycle."""
    chain: list[int] = []
    places: list[str] = []
    number = first
    group = None

    while number not in chain:
        chain.append(number)
        at = ranks[number].blocking_call(group)
        if at is None:
            places.append(f"rank {number}, which has finished")
            break
        call = ranks[number].calls[at]
        places.append(
            f"rank {number} in {call.kind} of {call.elements:,} {call.dtype} in {call.group} at {call.place}"
        )
        group = call.group
        number = next(
            member for member in call.ranks if member in ranks and ranks[member].same(group, call) is None
        )
    else:
        del places[: chain.index(number)]

    return "a hang, because the order of calls differs between groups: " + " waits for ".join(places)
