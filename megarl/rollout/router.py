"""Which replica gets which request: pure, so that every order of events can be tried.

Requests wait in the order of their arrival, but for those that go first; a replica gets the next ones up to a bound on what it has in
flight, and of several that have room the one with the least in flight comes first. When a replica is lost, what it had in flight goes
back to its place in the queue. A request ends once: what comes twice, or from a replica that does not have it, is an error; what was
taken back and comes all the same is nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

Request = TypeVar("Request")
_Place = tuple[int, int]  # 0 for what goes on, 1 for what goes first, 2 for others; and its number


class DispatchError(RuntimeError):
    """A replica finished what it was not given, or what it had finished before."""


class RequestQueue(Generic[Request]):
    """`num_replicas`: numbered from 0. `max_concurrency`: requests that each has in flight."""

    def __init__(self, num_replicas: int, max_concurrency: int) -> None:
        self._requests: dict[int, Request] = {}  # that are not finished
        self._places: dict[int, _Place] = {}  # of these
        self._preferred: dict[int, int] = {}  # the replica that has computed the beginning of a request before
        self._waiting: list[tuple[_Place, int]] = []  # a heap; what was taken back is still in it
        self._in_flight: list[set[int]] = [set() for _ in range(num_replicas)]
        self._taken_back: list[set[int]] = [set() for _ in range(num_replicas)]  # while the replica had them
        self._max_concurrency = max_concurrency
        self._last_id = -1

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def load(self, replica: int) -> int:
        """Requests that it has in flight."""
        return len(self._in_flight[replica])

    def in_flight(self) -> list[set[int]]:
        """The ids of the requests that each replica has. Any thread may ask."""
        return [numbers.copy() for numbers in self._in_flight]

    def add(self, requests: Iterable[tuple[int, Request]], *, first: bool = False, prefer: int | None = None) -> None:
        """(id, request) in the order of arrival; `first`: they go before others. prefer: the replica that has computed their beginning, so
        that they go before all others; it gets them, unless it has no room, or more than twice as much in flight as another.

        Raises ValueError for ids that do not rise."""
        for request_id, request in requests:
            if request_id <= self._last_id:
                raise ValueError(f"the ids of requests must rise: {request_id} came after {self._last_id}")
            self._last_id = request_id
            self._requests[request_id] = request
            self._places[request_id] = place = (0 if prefer is not None else 1 if first else 2, request_id)
            heapq.heappush(self._waiting, (place, request_id))
            if prefer is not None:
                self._preferred[request_id] = prefer

    def resize(self, num_replicas: int) -> None:
        """Replicas join, or those with the highest numbers leave, which have lost what they had."""
        joining = num_replicas - len(self._in_flight)
        assert not any(self._in_flight[num_replicas:])
        self._in_flight = self._in_flight[:num_replicas] + [set() for _ in range(joining)]
        self._taken_back = self._taken_back[:num_replicas] + [set() for _ in range(joining)]

    def take_back(self, request_ids: Collection[int]) -> dict[int, list[int]]:
        """Nobody waits for these any more; returns what of them replicas have in flight, by replica."""
        wanted = self._requests.keys() & set(request_ids)
        for request_id in wanted:
            self._drop(request_id)
        given_up: dict[int, list[int]] = {}
        for replica, in_flight in enumerate(self._in_flight):
            if begun := in_flight & wanted:
                in_flight -= begun
                self._taken_back[replica] |= begun
                given_up[replica] = sorted(begun)
        return given_up

    def deal(self, ready: Collection[int]) -> dict[int, list[Request]]:
        """Gives waiting requests to the replicas of `ready`, as many as they may have; those that get none are left out."""
        dealt: dict[int, list[Request]] = {}
        while self._waiting and ready:
            least = min(ready, key=lambda number: (self.load(number), number))
            if self.load(least) >= self._max_concurrency:
                break
            _, request_id = heapq.heappop(self._waiting)
            if request_id in self._requests:
                preferred = self._preferred.get(request_id, least)
                most = min(2 * (self.load(least) + 1), self._max_concurrency - 1)
                replica = preferred if preferred in ready and self.load(preferred) <= most else least
                self._in_flight[replica].add(request_id)
                dealt.setdefault(replica, []).append(self._requests[request_id])
        return dealt

    def finish(self, replica: int, request_id: int) -> bool:
        """False where the request was taken back. Raises DispatchError for one that the replica does not have in flight."""
        if request_id in self._taken_back[replica]:
            self._taken_back[replica].remove(request_id)
            return False
        if request_id not in self._in_flight[replica]:
            known = (
                "was finished before" if 0 <= request_id <= self._last_id and request_id not in self._requests else "was not given to it"
            )
            raise DispatchError(f"replica {replica} finished request {request_id}, which {known}")
        self._in_flight[replica].remove(request_id)
        self._drop(request_id)
        return True

    def lose(self, replica: int) -> Collection[int]:
        """Puts what the replica has in flight back to its place in the queue; the ids."""
        lost = self._in_flight[replica]
        for request_id in lost:
            heapq.heappush(self._waiting, (self._places[request_id], request_id))
        self._in_flight[replica], self._taken_back[replica] = set(), set()
        return lost

    def _drop(self, request_id: int) -> None:
        del self._requests[request_id]
        del self._places[request_id]
        self._preferred.pop(request_id, None)
