"""Test the request queue: hand-made cases, and random orders of finishing and losing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rollout.router import RequestRouter, RequestRoutingError


def queue(count: int, num_replicas: int, max_concurrency: int) -> RequestRouter[str]:
    requests: RequestRouter[str] = RequestRouter(num_replicas, max_concurrency)
    requests.add(named(*range(count)))
    return requests


def named(*numbers: int) -> list[tuple[int, str]]:
    return [(number, f"r{number}") for number in numbers]


def test_requests_are_dealt_in_order_to_the_least_loaded() -> None:
    requests = queue(7, num_replicas=2, max_concurrency=3)
    assert requests.assign([1]) == {1: ["r0", "r1", "r2"]}
    assert requests.assign([0, 1]) == {0: ["r3", "r4", "r5"]}
    assert requests.assign([0, 1]) == {}  # both are full
    requests.finish(1, 0)
    requests.finish(1, 2)
    requests.finish(0, 4)
    assert requests.assign([0, 1]) == {1: ["r6"]}  # has one request, the other two
    assert (requests.load(0), requests.load(1), requests.num_unfinished) == (2, 2, 4)


def test_an_even_share_at_the_start() -> None:
    assert queue(5, num_replicas=2, max_concurrency=9).assign([0, 1]) == {
        0: ["r0", "r2", "r4"],
        1: ["r1", "r3"],
    }


def test_continued_requests_go_first_and_to_their_replica_if_it_has_room() -> None:
    requests = queue(2, num_replicas=2, max_concurrency=3)
    requests.add(named(2), first=True)
    requests.add(named(3, 4, 5, 6), prefer=1)

    # the other replica if it is full
    assert requests.assign([0, 1]) == {1: ["r3", "r4", "r5"], 0: ["r6", "r2", "r0"]}
    requests.add(named(7), prefer=1)
    assert requests.requeue(1) == {3, 4, 5}
    assert requests.assign([0]) == {}
    requests.finish(0, 6)
    assert requests.assign([0]) == {0: ["r3"]}  # or if it is not ready
    uneven = queue(0, num_replicas=2, max_concurrency=9)
    uneven.add(named(*range(4)), prefer=1)
    assert uneven.assign([0, 1]) == {1: ["r0", "r1", "r2"], 0: ["r3"]}  # more than twice as many, and two


def test_what_a_lost_replica_had_goes_first() -> None:
    requests = queue(6, num_replicas=2, max_concurrency=2)
    requests.assign([0, 1])
    requests.finish(0, 2)
    assert len(requests.requeue(1)) == 2
    assert requests.assign([0]) == {0: ["r1"]}
    assert requests.assign([1]) == {1: ["r3", "r4"]}
    assert len(requests.requeue(1)) == 2
    assert requests.assign([1]) == {1: ["r3", "r4"]}


def test_what_was_not_given_or_came_before_is_an_error() -> None:
    requests = queue(2, num_replicas=2, max_concurrency=2)
    requests.assign([0])
    requests.finish(0, 1)

    for replica, request_id, message in [
        (0, 1, "replica 0 finished request 1, which was finished before"),
        (1, 0, "replica 1 finished request 0, which was not given to it"),
        (0, 9, "replica 0 finished request 9, which was not given to it"),
    ]:
        with pytest.raises(RequestRoutingError, match=message):
            requests.finish(replica, request_id)

    with pytest.raises(ValueError, match="must increase: 1 came after 1"):
        requests.add(named(1))


def test_requests_come_and_are_taken_back_while_others_run() -> None:
    requests = queue(3, num_replicas=2, max_concurrency=1)
    assert requests.assign([0, 1]) == {0: ["r0"], 1: ["r1"]}
    requests.add(named(3))
    requests.add(named(4, 5), first=True)
    assert requests.cancel([0, 2, 5, 99]) == {0: [0]}
    assert (requests.num_unfinished, requests.load(0)) == (3, 0)
    assert requests.assign([0]) == {0: ["r4"]}
    assert not requests.finish(0, 0)  # it was in transit
    assert requests.finish(0, 4)
    assert len(requests.requeue(1)) == 1
    assert requests.assign([0]) == {0: ["r1"]}  # it arrived before the other
    assert requests.assign([1]) == {1: ["r3"]}


@given(
    count=st.integers(0, 20),
    num_replicas=st.integers(1, 4),
    max_concurrency=st.integers(1, 5),
    events=st.lists(
        st.tuples(
            st.sampled_from(["assign", "finish", "requeue", "add", "cancel"]),
            st.integers(0, 3),
            st.integers(0, 100),
        ),
        max_size=80,
    ),
)
def test_nothing_is_lost_or_doubled_whatever_happens(
    count: int, num_replicas: int, max_concurrency: int, events: list[tuple[str, int, int]]
) -> None:
    requests = queue(count, num_replicas, max_concurrency)
    held: list[list[int]] = [[] for _ in range(num_replicas)]  # what each replica has, tracked independently
    finished: list[int] = []
    cancelled: set[int] = set()
    waiting = list(range(count))

    def assign(ready: list[int]) -> None:
        loads = [len(one) for one in held]
        for replica, assigned in requests.assign(ready).items():
            held[replica] += [int(request[1:]) for request in assigned]
        new = sorted(number for number in waiting if any(number in one for one in held))
        assert new == sorted(waiting)[: len(new)]  # the earliest arrivals
        for number in new:
            waiting.remove(number)
        assert all(len(one) <= max_concurrency for one in held)

        # no replica is kept idle
        assert not waiting or all(len(held[replica]) == max_concurrency for replica in ready)
        for replica in ready:  # no replica got one while another had fewer
            if len(held[replica]) > loads[replica]:
                assert len(held[replica]) - 1 <= min(len(held[other]) for other in ready)

    for event, replica, choice in events:
        replica %= num_replicas
        if event == "add":
            requests.add(named(count))
            waiting.append(count)
            count += 1
        elif event == "cancel":
            in_flight = requests.cancel([choice])
            assert in_flight == {holder: [choice] for holder, numbers in enumerate(held) if choice in numbers}
            for numbers in (waiting, *held):
                if choice in numbers:
                    numbers.remove(choice)
                    cancelled.add(choice)
        elif event == "assign":
            assign([number for number in range(num_replicas) if choice >> number & 1])
        elif event == "requeue":
            assert len(requests.requeue(replica)) == len(held[replica])
            waiting += held[replica]
            held[replica] = []
        elif held[replica]:
            number = held[replica].pop(choice % len(held[replica]))
            requests.finish(replica, number)
            finished.append(number)

    while requests.num_unfinished:  # and it always terminates
        assign(list(range(num_replicas)))
        for replica, numbers in enumerate(held):
            for number in numbers:
                requests.finish(replica, number)
            finished += numbers
            numbers.clear()

    assert sorted(finished) == [number for number in range(count) if number not in cancelled]
