"""Detect deadlocks of ranks whose calls agree within each group but whose order differs between groups. Pure.

The model follows NCCL on devices. A call starts once all previous calls of its group have ended and the
device has reached it, and ends once all members have started it. The device continues, and blocks where it
waits for a call. All calls of a group, including messages, run one after another, because each group has a
single communicator, which is created with its device; the messages of one batch run at the same time. A
message ends when both sender and receiver have reached it, as large messages do. Ranks that were not
simulated are assumed to reach every call.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from megarl.rehearsal.record import POINT_TO_POINT, Await, Collective, RankRecord


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
        numbers = (number for number in self.at_work(group) if _meet(self.calls[number], call))
        return next(numbers, None)

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
    return _told(ranks, waiting[0]) if waiting else None


def _end_where_all_are_there(ranks: dict[int, _Rank], group: str, call: Collective) -> bool:
    numbers = {member: ranks[member].same(group, call) for member in call.ranks if member in ranks}
    # A collective ends only when every simulated member has reached it.
    if None in numbers.values():
        return False

    for member, number in numbers.items():
        assert number is not None
        ranks[member].end(number)

    return True


def _told(ranks: dict[int, _Rank], first: int) -> str:
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
