"""Replicas that are made up, on a clock of their own."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megarl.config.errors import RunError
from megarl.controller.errors import RankReport
from megarl.controller.worker import RemoteMethod
from megarl.roles.pump import RolloutLimits
from megarl.roles.replicas import Alone, nobody_else
from megarl.rollout.interface import FinishedRequest, Sample, VersionSpan
from megarl.workers.rollout_worker import RolloutWorker
from tests.fake_engine import plain_sample

LIMITS = RolloutLimits(max_concurrency=2, answer_limit_s=60, sample_limit_s=200)
START_TICKS = 30


class Clock:
    """Goes on only where someone waits."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def wait(self, futures: Sequence[Any], wait_s: float) -> list[Any]:
        until_s = self.now_s + wait_s
        while not any(future.ended for future in futures) and self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        ended = [future for future in futures if future.ended]
        self.now_s = self.now_s if ended else until_s
        return ended


class Answer:
    def __init__(self) -> None:
        self.ended = False
        self.value: list[FinishedRequest] = []

    def get(self) -> list[FinishedRequest]:
        return self.value

    def end(self, value: Sequence[FinishedRequest] = ()) -> None:
        self.ended, self.value = True, [*self.value, *value]


class Engine:
    """Stands in for the group of a replica. The first token of a prompt is how many tokens its sample has.

    tick_s: of a token. pushes: when each version of the weights came, which goes on with what is in flight.
    """

    def __init__(self, clock: Clock, start_s: float = 0.0, pushes: Sequence[tuple[float, int]] = ((0.0, 1),), tick_s: float = 1.0) -> None:
        self._clock, self._pushes, self._tick_s = clock, pushes, tick_s
        self.submitted: list[tuple[float, list[int]]] = []  # when, and which prompts
        self.aborted: list[int] = []
        self._lengths: dict[int, int] = {}
        self._held: dict[int, float] = {}  # when each is ready
        self._call: Answer | None = None
        self.ready = Answer()
        clock.at(clock.now_s + start_s, self.ready.end)

    def call(self, method: RemoteMethod, *arguments: Any) -> Answer:
        answer = Answer()
        if method is RolloutWorker.abort:
            self.aborted += arguments[0]
            for number in arguments[0]:
                del self._held[number]
            return answer
        assert method is RolloutWorker.submit_and_poll
        assert self._call is None or self._call.ended  # one at a time
        requests, wait_s = arguments
        if requests:
            self.submitted.append((self._clock.now_s, [request.prompt[0] for request in requests]))
        self._lengths |= {request.request_id: request.prompt[0] for request in requests}
        self._held |= {request.request_id: self._clock.now_s + request.prompt[0] * self._tick_s for request in requests}
        self._call = answer
        first_s = min(self._held.values(), default=float("inf"))
        self._clock.at(min(max(first_s, self._clock.now_s), self._clock.now_s + wait_s), lambda: self._end(answer))
        return answer

    def call_beside(self, method: RemoteMethod) -> None:
        assert method is RolloutWorker.nudge
        call = self._call
        assert call is not None
        self._clock.at(self._clock.now_s + 0.001, lambda: self._end(call))

    def _end(self, answer: Answer) -> None:
        if not answer.ended:
            ready = [number for number, at_s in self._held.items() if at_s <= self._clock.now_s]
            answer.end([FinishedRequest(number, self._sample(self._lengths[number], self._held.pop(number))) for number in ready])

    def _sample(self, length: int, end_s: float) -> Sample:
        drawn_s = end_s + (np.arange(length) - length) * self._tick_s
        versions = [max(version for at_s, version in self._pushes if at_s <= max(0.0, at)) for at in drawn_s]
        ends = [index for index in range(1, length + 1) if index == length or versions[index] != versions[index - 1]]
        spans = tuple(VersionSpan(versions[end - 1], end) for end in ends)
        return plain_sample([5] * length, [-1.0] * length, "length", 1)._replace(spans=spans)

    def reports(self) -> list[RankReport]:
        return []


class Engines:
    """Stands in for Replicas."""

    def __init__(self, clock: Clock, count: int, limit: int = 2, tick_s: float = 1.0) -> None:
        self._clock, self._limit, self._tick_s = clock, limit, tick_s
        self.pushes = [(0.0, 1)]
        self.groups = [Engine(clock, pushes=self.pushes, tick_s=tick_s) for _ in range(count)]
        self.starting: set[int] = set()
        self.restarted: list[tuple[float, int]] = []
        self.alone: Alone = nobody_else

    def __len__(self) -> int:
        return len(self.groups)

    def restart(self, number: int, why: str) -> None:
        if len(self.restarted) == self._limit:
            raise RunError("too many")
        self.restarted.append((self._clock.now_s, number))
        self.groups[number] = Engine(self._clock, START_TICKS * self._tick_s, self.pushes, self._tick_s)
        self.starting.add(number)
