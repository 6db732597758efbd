"""Simulated replicas on a virtual clock, which generate without a model and fail on command.

Each request ends after its number of tokens, at a fixed rate. They are attributed to the weights loaded at
the time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import numpy as np

from megarl.agents.trajectory import Sample, VersionSpan
from megarl.controller.errors import RankFailure, RankReport, WorkerError
from megarl.controller.messages import CallFailure, FailureKind
from megarl.controller.worker import RemoteMethod
from megarl.machine.errors import RunError
from megarl.rollout.driver.replicas import ExclusiveAccess, unshared
from megarl.rollout.interface import EndedRequest, GenerationRequest, RequestFailedError
from megarl.rollout.worker.rollout_worker import RolloutWorker

FinishReason = Literal["stop", "length"]


def equal_tokens(request: GenerationRequest, length: int) -> Sample:
    """Write a sample of `length` tokens that are all the same, without its versions."""
    reason: FinishReason = "length" if length == request.sampling.max_new_tokens else "stop"
    token_ids = np.full(length, 5, dtype=np.int32)
    return Sample(token_ids, np.full(length, -1.0, dtype=np.float32), reason, spans=())


class _InFlight:
    """A request in flight.

    It records when its sample is ready, and which versions wrote its tokens before the last update.
    """

    def __init__(self, request: GenerationRequest, length: int, ready_s: float) -> None:
        self.request = request
        self.length = length
        self.ready_s = ready_s
        self.spans: list[VersionSpan] = []

    def written_until(self, end: int, version: int) -> None:
        """Record that `version` sampled the tokens up to `end` that were not recorded before."""
        if end > (self.spans[-1].end if self.spans else 0):
            self.spans.append(VersionSpan(version, end))


class SimulatedGeneration:
    """The requests in flight at one engine.

    Args:
        now_s: Returns the time.
        length_of: Returns the number of tokens of a request's sample, or 0 if the request fails after one
            token.
        write: Returns a sample that is ready, without its versions.
        token_s: Time per token. If 0, every sample is ready at once.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        length_of: Callable[[GenerationRequest], int],
        write: Callable[[GenerationRequest, int], Sample] = equal_tokens,
        token_s: float = 1.0,
        version: int = 0,
    ) -> None:
        self._now_s = now_s
        self._length_of = length_of
        self._write = write
        self._token_s = token_s
        self._version = version
        self._requests: dict[int, _InFlight] = {}

    @property
    def next_s(self) -> float:
        """The time at which the next sample is ready."""
        return min((each.ready_s for each in self._requests.values()), default=math.inf)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Start generating samples.

        Each takes the time of its own tokens, regardless of the number of requests.
        """
        now_s = self._now_s()
        for request in requests:
            length = self._length_of(request)
            ready_s = now_s + max(1, length) * self._token_s
            self._requests[request.request_id] = _InFlight(request, length, ready_s)

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """Drop these requests, or all. Some may have completed already."""
        for number in list(self._requests) if request_ids is None else request_ids:
            self._requests.pop(number, None)

    def collect(self, at_most: int | None = None) -> list[EndedRequest]:
        """Return completed requests in the order in which they were submitted."""
        now_s = self._now_s()
        ready = [number for number, each in self._requests.items() if each.ready_s <= now_s]
        return [self._end(self._requests.pop(number)) for number in ready[:at_most]]

    def update(self, version: int, pause_s: float = 0.0) -> None:
        """Continue with the weights of `version` after a pause. Tokens written so far are kept."""
        now_s = self._now_s()
        for each in self._requests.values():
            if self._token_s:
                # The small number keeps rounding errors from counting another token.
                left = math.ceil((each.ready_s - now_s) / self._token_s - 1e-9)
                each.written_until(each.length - max(0, left), self._version)
            each.ready_s += pause_s

        self._version = version

    def _end(self, ended: _InFlight) -> EndedRequest:
        number = ended.request.request_id
        if not ended.length:
            return number, RequestFailedError("scripted")
        sample = self._write(ended.request, ended.length)
        ended.written_until(len(sample.token_ids), self._version)

        return number, sample._replace(spans=tuple(ended.spans))


class VirtualClock:
    """Virtual clock that advances only while someone waits.

    Events run in the order of their times; events at the same time run in the order in which they were
    scheduled.

    Args:
        on_event: Called with the number of each event, from 0, after it has happened.
    """

    def __init__(self, on_event: Callable[[int], None] = lambda number: None) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._on_event = on_event
        self._num_happened = 0

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    @property
    def next_s(self) -> float:
        """Time of the next event."""
        return self._events[0][0] if self._events else float("inf")

    def wait(self, futures: Sequence[Any], wait_s: float) -> list[Any]:
        """Same interface as wait_for_any."""
        # Process events until one of the futures completes or the time is over.
        until_s = self.now_s + wait_s
        while not any(future.ended for future in futures) and self.next_s <= until_s:
            self._happen()
        ended = [future for future in futures if future.ended]
        self.now_s = self.now_s if ended else until_s

        return ended

    def pass_by(self, seconds: float) -> None:
        """Advance the clock while the driver is busy.

        Events that become due in the meantime are handled late.
        """
        until_s = self.now_s + seconds
        while self.next_s <= until_s:
            self._happen()
        self.now_s = until_s

    def _happen(self) -> None:
        time_s, _, event = heapq.heappop(self._events)
        self.now_s = max(self.now_s, time_s)  # events that became due while nothing waited happen late
        event()
        self._num_happened += 1
        self._on_event(self._num_happened - 1)


class Answer:
    """Stub for the future of a call."""

    def __init__(self) -> None:
        self.ended = False
        self._value: list[EndedRequest] = []
        self._error: WorkerError | None = None

    def get(self) -> list[EndedRequest]:
        if self._error is not None:
            raise self._error
        return self._value

    def end(self, value: Sequence[EndedRequest] = (), error: WorkerError | None = None) -> None:
        if not self.ended:
            self.ended = True
            self._value = list(value)
            self._error = error


class ScriptedEngine:
    """Stub for the worker group of a replica.

    Args:
        length_of: Returns the number of tokens of a request's sample, or 0 if the request fails after one
            token.
        start_s: Time until the engine is ready.
    """

    def __init__(
        self,
        clock: VirtualClock,
        length_of: Callable[[GenerationRequest], int],
        version: int,
        start_s: float = 0.0,
        tick_s: float = 1.0,
    ) -> None:
        self._clock = clock
        self._generation = SimulatedGeneration(
            lambda: clock.now_s, length_of, token_s=tick_s, version=version
        )
        self.submitted: list[tuple[float, list[GenerationRequest]]] = []  # when, and which requests
        self.aborted: list[int] = []
        self._call: Answer | None = None
        self._death: WorkerError | None = None
        self.ready = Answer()
        clock.at(clock.now_s + start_s, self.ready.end)

    @property
    def is_at_call(self) -> bool:
        return self._call is not None and not self._call.ended

    def call(self, method: RemoteMethod, *arguments: Any) -> Answer:
        answer = Answer()
        if method is RolloutWorker.abort:
            self.aborted += arguments[0]
            self._generation.abort(arguments[0])
            return answer

        assert method is RolloutWorker.submit_and_poll
        assert not self.is_at_call

        if self._death is not None:
            answer.end(error=self._death)
            return answer

        requests, wait_s = arguments
        if requests:
            self.submitted.append((self._clock.now_s, list(requests)))
            self._generation.submit(requests)

        # The call returns with the first sample, or after the wait.
        self._call = answer
        self._clock.at(
            min(max(self._generation.next_s, self._clock.now_s), self._clock.now_s + wait_s),
            lambda: self._end(answer),
        )

        return answer

    def call_beside(self, method: RemoteMethod) -> None:
        assert method is RolloutWorker.interrupt
        call = self._call
        assert call is not None
        self._clock.at(self._clock.now_s, lambda: self._end(call))

    def push(self, version: int, pause_s: float) -> None:
        """Load the weights of `version` after a pause. Requests in flight continue with them."""
        assert not self.is_at_call
        self._generation.update(version, pause_s)

    def die(self) -> None:
        # The scheduler must not be able to distinguish this from the death of a real process.
        failure = CallFailure(FailureKind.death, "it was killed", "", self._clock.now_s)
        self._death = WorkerError(
            RankFailure("rollout", 0, "simulated", None, RolloutWorker.submit_and_poll.name, failure)
        )
        if self._call is not None:
            self._call.end(error=self._death)

    def _end(self, answer: Answer) -> None:
        if not answer.ended:
            answer.end(self._generation.collect())

    def reports(self) -> list[RankReport]:
        return []


class ScriptedEngines:
    """Stub for Replicas.

    Args:
        version: Version of the initial weights.
        start_s: Startup time of a restarted replica.
    """

    def __init__(
        self,
        clock: VirtualClock,
        count: int,
        length_of: Callable[[GenerationRequest], int],
        *,
        version: int = 1,
        restart_limit: int = 1000,
        start_s: float = 30.0,
        tick_s: float = 1.0,
    ) -> None:
        self._clock = clock
        self._length_of = length_of
        self._restart_limit = restart_limit
        self._start_s = start_s
        self._tick_s = tick_s
        self._version = version
        self.groups = [ScriptedEngine(clock, length_of, version, tick_s=tick_s) for _ in range(count)]
        self.starting: set[int] = set()
        self.restarted: list[tuple[float, int]] = []
        self.exclusive: ExclusiveAccess = unshared

    def __len__(self) -> int:
        return len(self.groups)

    def push(self, version: int, pause_s: float = 0.0) -> None:
        """Sync weights to all replicas, including those that are starting. No call may be in progress."""
        self._version = version
        for engine in self.groups:
            engine.push(version, pause_s)
        self.starting.clear()

    def readmit(self, number: int) -> bool:
        """Send the current weights to a restarted engine."""
        self.groups[number].push(self._version, 0.0)
        self.starting.discard(number)
        return True

    def restart(self, number: int, why: str) -> None:
        if len(self.restarted) == self._restart_limit:
            raise RunError("too many")
        self.restarted.append((self._clock.now_s, number))
        self.groups[number] = ScriptedEngine(
            self._clock, self._length_of, self._version, self._start_s, self._tick_s
        )
        self.starting.add(number)
