"""Ranks whose calls agree within each group hang only if a device would wait forever: sequences written by hand."""

from __future__ import annotations

import pytest

from megarl.rehearse.dry_run.ranks import deadlock
from megarl.rehearse.dry_run.record import Await, Collective, PhaseRecord, RankRecord

A = ("A", (0, 1))
B = ("B", (0, 1))


def call(
    group: tuple[str, tuple[int, ...]], kind: str = "all_reduce", batch: int | None = None
) -> Collective:
    return Collective(kind, group[0], group[1], "float32", 8, 32, f"{kind} {group[0]}", batch)


def rank(number: int, *calls: Collective, awaits: list[tuple[int, int]] | None = None) -> RankRecord:
    """Return a record. Without `awaits`, each call is awaited at once."""
    if awaits is None:
        awaits = [(made, made + 1) for made in range(len(calls))]
    phase = PhaseRecord(
        name="train",
        held=0,
        peak=0,
        flops=0,
        collectives=calls,
        host_syncs=(),
        awaits=tuple(Await(*each) for each in awaits),
    )
    return RankRecord(
        rank=number,
        tensor_rank=0,
        context_rank=0,
        pipeline_rank=0,
        data_rank=0,
        num_parameters=0,
        phases=(phase,),
    )


def test_the_same_order_ends() -> None:
    assert deadlock([rank(0, call(A), call(B)), rank(1, call(A), call(B))]) is None


def test_two_groups_in_different_orders_hang_with_both_places() -> None:
    assert deadlock([rank(0, call(A), call(B)), rank(1, call(B), call(A))]) == (
        "a hang, because the order of calls differs between groups: rank 0 in all_reduce of 8 float32 in A at "
        "all_reduce A waits for rank 1 in all_reduce of 8 float32 in B at all_reduce B"
    )


@pytest.mark.parametrize(
    ("awaits", "hangs"),
    [
        ([(0, 2), (1, 2)], False),  # both are started before either is awaited
        ([(1, 2), (0, 2)], False),
        ([(0, 1), (1, 2)], True),
    ],
)
def test_asynchronous_calls_hold_up_only_who_waits_for_them(
    awaits: list[tuple[int, int]], hangs: bool
) -> None:
    """It is enough that one of the two continues."""
    problem = deadlock([rank(0, call(A), call(B), awaits=awaits), rank(1, call(B), call(A))])
    assert (problem is not None) == hangs


def test_three_ranks_in_a_circle_hang_and_one_that_leads_there_is_not_named() -> None:
    """Rank 3 waits for rank 0, which is in the cycle."""
    pairs = {pair: (f"{pair[0]}{pair[1]}", pair) for pair in ((0, 1), (1, 2), (0, 2), (0, 3))}
    problem = deadlock(
        [
            rank(3, call(pairs[0, 3])),
            rank(0, call(pairs[0, 1]), call(pairs[0, 2]), call(pairs[0, 3])),
            rank(1, call(pairs[1, 2]), call(pairs[0, 1])),
            rank(2, call(pairs[0, 2]), call(pairs[1, 2])),
        ]
    )
    assert problem is not None
    assert [f"rank {number} in" in problem for number in range(4)] == [True, True, True, False]
    assert (
        deadlock(
            [
                rank(3, call(pairs[0, 3])),
                rank(0, call(pairs[0, 1]), call(pairs[0, 2]), call(pairs[0, 3])),
                rank(1, call(pairs[0, 1]), call(pairs[1, 2])),
                rank(2, call(pairs[0, 2]), call(pairs[1, 2])),
            ]
        )
        is None
    )


def messages(number: int, batch: int | None, first: str) -> list[Collective]:
    """Return the calls of one of two ranks that send to each other."""
    send = ("P", (number, 1 - number))
    receive = ("P", (1 - number, number))
    both = [call(send, "send", batch), call(receive, "recv", batch)]
    return both if first == "send" else both[::-1]


@pytest.mark.parametrize(
    ("batch", "first", "hangs"),
    [(1, ("send", "send"), False), (None, ("send", "recv"), False), (None, ("send", "send"), True)],
)
def test_messages_that_cross_hang_unless_they_are_given_at_once(
    batch: int | None, first: tuple[str, str], hangs: bool
) -> None:
    """Applies even without waiting in between, because those of a group run one after another."""
    records = [
        rank(number, *messages(number, batch, first[number]), awaits=[(0, 2), (1, 2)]) for number in (0, 1)
    ]
    problem = deadlock(records)
    assert (problem is not None) == hangs
    if problem is not None:
        assert "rank 0 in send of 8 float32 in P at send P waits for rank 1 in send" in problem


def test_messages_stand_in_the_row_of_their_groups_collectives() -> None:
    """A communicator runs one operation after another, whatever it is and whoever waits."""
    sum_first = rank(0, call(("P", (0, 1))), call(("P", (0, 1)), "send"), awaits=[])
    message_first = rank(1, call(("P", (0, 1)), "recv"), call(("P", (0, 1))), awaits=[])
    assert deadlock([sum_first, message_first]) is not None


def test_ranks_that_were_not_simulated_reach_every_collective() -> None:
    assert deadlock([rank(0, call(A), call(B), call(("P", (0, 7)), "send"))]) is None
    assert deadlock([rank(0, call(A)), rank(5)]) is None
