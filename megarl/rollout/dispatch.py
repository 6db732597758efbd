"""Which replica gets which request: pure, so that every order of events can be tried.

Requests wait in the order of their arrival; a replica that can take some gets the next ones, up to a bound on what it has in
flight, and of several the one with the least in flight comes first. When a replica is lost, what it had in flight goes back to
the front of the queue. A request ends once: what comes twice, or from a replica that does not have it, is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

Request = TypeVar("Request")


class DispatchError(RuntimeError):
    """A replica finished what it was not given, or what it had finished before."""


class RequestQueue(Generic[Request]):
    """`requests`: (id, request) in the order of arrival, ids unique. `num_replicas`: numbered from 0. `max_concurrency`: of each."""

    def __init__(self, requests: Iterable[tuple[int, Request]], num_replicas: int, max_concurrency: int) -> None:
        arrivals = list(requests)
        self._requests = dict(arrivals)
        if len(self._requests) != len(arrivals):
            raise ValueError("the ids of requests must be unique")
        self._place = {request_id: place for place, (request_id, _) in enumerate(arrivals)}
        self._waiting = deque(self._requests)
        self._in_flight: list[set[int]] = [set() for _ in range(num_replicas)]
        self._max_concurrency = max_concurrency

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def load(self, replica: int) -> int:
        """Requests that it has in flight."""
        return len(self._in_flight[replica])

    def deal(self, ready: Collection[int]) -> dict[int, list[Request]]:
        """Gives waiting requests to the replicas of `ready`, as many as they may have; those that get none are left out."""
        dealt: dict[int, list[Request]] = {}
        while self._waiting and ready:
            replica = min(ready, key=lambda number: (self.load(number), number))
            if self.load(replica) >= self._max_concurrency:
                break
            request_id = self._waiting.popleft()
            self._in_flight[replica].add(request_id)
            dealt.setdefault(replica, []).append(self._requests[request_id])
        return dealt

    def finish(self, replica: int, request_id: int) -> None:
        """Raises DispatchError for a request that the replica does not have in flight."""
        if request_id not in self._in_flight[replica]:
            known = "was finished before" if request_id in self._place and request_id not in self._requests else "was not given to it"
            raise DispatchError(f"replica {replica} finished request {request_id}, which {known}")
        self._in_flight[replica].remove(request_id)
        del self._requests[request_id]

    def lose(self, replica: int) -> int:
        """Puts what the replica has in flight back to the front, in the order of arrival; how many that were."""
        lost = sorted(self._in_flight[replica], key=self._place.__getitem__)
        self._in_flight[replica].clear()
        self._waiting = deque(sorted([*lost, *self._waiting], key=self._place.__getitem__))
        return len(lost)
