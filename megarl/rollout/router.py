"""Request router, which decides which replica gets which request.

It is pure, so that tests can try every order of events.

Requests are queued in order of arrival, except for those with priority. A replica gets the next requests up
to its limit of requests in flight; among several replicas with room, the one with the fewest requests in
flight is served first. When a replica is lost, its requests return to their positions in the queue. Each
request finishes once: a request that finishes twice, or at a replica that does not have it, is an error. A
cancelled request that still finishes is ignored.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

# 0 for continued requests, 1 for requests with priority, 2 for others; then the request id
_Place = tuple[int, int]


class RequestRoutingError(RuntimeError):
    """A replica finished a request that it was not given, or that it had finished before."""


class RequestRouter[Request]:
    """Queue of requests for replicas, which holds each request until it has finished.

    Args:
        num_replicas: Number of replicas, which are numbered from 0.
        max_concurrency: Maximum number of requests in flight at a replica.
    """

    def __init__(self, num_replicas: int, max_concurrency: int) -> None:
        # unfinished requests, with their places in the queue and the replicas that have their prefixes
        self._requests: dict[int, tuple[Request, _Place, int | None]] = {}
        self._waiting: list[_Place] = []  # a heap, which may still contain cancelled requests
        self._in_flight: list[set[int]] = [set() for _ in range(num_replicas)]

        # cancelled while they were in flight at the replica
        self._cancelled: list[set[int]] = [set() for _ in range(num_replicas)]
        self._max_concurrency = max_concurrency
        self._last_id = -1

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def unfinished(self) -> dict[int, Request]:
        """Return the unfinished requests by id, in order of arrival. Thread-safe."""
        return {number: request for number, (request, *_) in self._requests.copy().items()}

    def load(self, replica: int) -> int:
        """Return the number of requests in flight at a replica."""
        return len(self._in_flight[replica])

    def in_flight(self) -> list[set[int]]:
        """Return the ids of the requests in flight at each replica. Thread-safe."""
        return [numbers.copy() for numbers in self._in_flight]

    def add(
        self, requests: Iterable[tuple[int, Request]], *, first: bool = False, prefer: int | None = None
    ) -> None:
        """Queue requests.

        Args:
            requests: Pairs of id and request in order of arrival.
            first: Whether they have priority over others.
            prefer: Replica that has the prefix of the requests in its cache. They have priority over all
                others, and go to this replica unless it has no room or more than twice as many requests in
                flight as another.

        Raises:
            ValueError: The ids do not increase.
        """
        priority = 0 if prefer is not None else 1 if first else 2
        for request_id, request in requests:
            if request_id <= self._last_id:
                raise ValueError(f"request ids must increase: {request_id} came after {self._last_id}")
            self._last_id = request_id
            place = (priority, request_id)
            self._requests[request_id] = (request, place, prefer)
            heapq.heappush(self._waiting, place)

    def resize(self, num_replicas: int) -> None:
        """Add replicas, or remove those with the highest numbers, whose requests must have been requeued."""
        joining = num_replicas - len(self._in_flight)
        assert not any(self._in_flight[num_replicas:])
        # If replicas are removed, `joining` is negative and nothing is appended.
        self._in_flight = self._in_flight[:num_replicas] + [set() for _ in range(joining)]
        self._cancelled = self._cancelled[:num_replicas] + [set() for _ in range(joining)]

    def cancel(self, request_ids: Collection[int]) -> dict[int, list[int]]:
        """Cancel requests. Returns those that were in flight, by replica."""
        # Unknown ids belong to requests that have finished.
        wanted = self._requests.keys() & set(request_ids)
        for request_id in wanted:
            del self._requests[request_id]
        cancelled: dict[int, list[int]] = {}

        # A replica may still finish a cancelled request, so its id is kept until then.
        for replica, in_flight in enumerate(self._in_flight):
            if begun := in_flight & wanted:
                in_flight -= begun
                self._cancelled[replica] |= begun
                cancelled[replica] = sorted(begun)

        return cancelled

    def assign(self, ready: Collection[int]) -> dict[int, list[Request]]:
        """Assign queued requests to the replicas in `ready` up to their limits.

        Returns the requests of each replica that got any.
        """
        assigned: dict[int, list[Request]] = {}
        while self._waiting and ready:
            least = min(ready, key=lambda number: (self.load(number), number))
            if self.load(least) >= self._max_concurrency:
                break
            _, request_id = heapq.heappop(self._waiting)
            # A cancelled request stays in the heap until it is popped.
            if request_id in self._requests:
                # Follow the cached prefix unless its replica is much busier than the least busy one.
                request, _, prefer = self._requests[request_id]
                preferred = least if prefer is None else prefer
                most = min(2 * (self.load(least) + 1), self._max_concurrency - 1)
                replica = preferred if preferred in ready and self.load(preferred) <= most else least
                self._in_flight[replica].add(request_id)
                assigned.setdefault(replica, []).append(request)

        return assigned

    def finish(self, replica: int, request_id: int) -> Request | None:
        """Remove a finished request and return it, or None if it was cancelled.

        Raises:
            RequestRoutingError: The replica does not have the request in flight.
        """
        if request_id in self._cancelled[replica]:
            self._cancelled[replica].remove(request_id)
            return None

        if request_id not in self._in_flight[replica]:
            known = (
                "was finished before"
                if 0 <= request_id <= self._last_id and request_id not in self._requests
                else "was not given to it"
            )
            raise RequestRoutingError(f"replica {replica} finished request {request_id}, which {known}")

        self._in_flight[replica].remove(request_id)
        request, *_ = self._requests.pop(request_id)
        return request

    def requeue(self, replica: int) -> Collection[int]:
        """Requeue the requests in flight at a replica at their old positions. Returns their ids."""
        lost = self._in_flight[replica]
        for request_id in lost:
            heapq.heappush(self._waiting, self._requests[request_id][1])
        self._in_flight[replica] = set()
        # A lost replica finishes nothing, so its cancelled requests can be forgotten.
        self._cancelled[replica] = set()

        return lost
