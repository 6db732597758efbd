"""The pump over replicas that are made up, on a clock of their own: what is added meanwhile, taken back, lost, and held."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megarl.config.errors import RunError
from megarl.controller.errors import RankReport
from megarl.controller.register import RemoteMethod
from megarl.roles.pump import Pump, RolloutLimits
from megarl.rollout.interface import FinishedRequest, GenerationRequest, SamplingParameters
from megarl.workers.rollout_worker import RolloutWorker
from tests.fake_engine import plain_sample

LIMITS = RolloutLimits(max_concurrency=2, answer_limit_s=60, sample_limit_s=200)
START_S = 30.0


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
    """Stands in for the group of a replica. The first token of a prompt is how long its sample takes."""

    def __init__(self, clock: Clock, start_s: float = 0.0) -> None:
        self._clock = clock
        self.submitted: list[tuple[float, list[int]]] = []  # when, and which prompts
        self.aborted: list[int] = []
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
        self._held |= {request.request_id: self._clock.now_s + request.prompt[0] for request in requests}
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
            answer.end([FinishedRequest(number, plain_sample([5], [-1.0], "length", 1)) for number in ready])
            for number in ready:
                del self._held[number]

    def reports(self) -> list[RankReport]:
        return []


class Engines:
    """Stands in for Replicas."""

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self.groups = [Engine(clock) for _ in range(count)]
        self.starting: set[int] = set()
        self.restarted: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self.groups)

    def restart(self, number: int, why: str) -> None:
        if len(self.restarted) == 2:
            raise RunError("too many")
        self.restarted.append((self._clock.now_s, number))
        self.groups[number] = Engine(self._clock, START_S)
        self.starting.add(number)


class Scene:
    def __init__(self, num_replicas: int) -> None:
        self.clock = Clock()
        self.engines = Engines(self.clock, num_replicas)
        self.came: list[tuple[float, int]] = []  # when, and the request
        self.pump = Pump(self.engines, self._admit, LIMITS, clock=lambda: self.clock.now_s, wait=self.clock.wait)  # type: ignore[arg-type]

    def _admit(self, replica: int) -> bool:
        self.engines.starting.discard(replica)
        return True

    def add(self, *lengths: int, first: bool = False) -> list[int]:
        sampling = SamplingParameters(max_new_tokens=1, seed=0)
        return self.pump.add([GenerationRequest(length, [length], sampling) for length in lengths], self._deliver, first=first)

    def _deliver(self, replica: int, finished: FinishedRequest) -> None:
        self.came.append((round(self.clock.now_s), finished.request_id))

    def run(self) -> list[tuple[float, int]]:
        while self.pump.num_unfinished:
            self.pump.turn()
        return self.came


def test_what_is_added_meanwhile_does_not_wait_behind_a_call() -> None:
    scene = Scene(2)
    scene.add(100, 101)
    scene.pump.turn(wait_s=1.0)
    scene.add(50, 40)
    scene.add(60, first=True)
    assert scene.run() == [(51, 50), (61, 60), (91, 40), (100, 100), (101, 101)]
    starts = sorted((round(at_s, 1), prompts) for engine in scene.engines.groups for at_s, prompts in engine.submitted)
    assert starts == [(0.0, [100]), (0.0, [101]), (1.0, [50]), (1.0, [60]), (51.0, [40])]


def test_what_is_taken_back_is_not_delivered_and_makes_room() -> None:
    scene = Scene(1)
    numbers = scene.add(100, 20, 30)
    scene.pump.turn(wait_s=1.0)
    scene.pump.take_back([numbers[0]])
    assert scene.run() == [(20, 20), (31, 30)]
    assert scene.engines.groups[0].aborted == [numbers[0]]
    scene.pump.take_back(numbers)  # of what has come nothing is left
    assert scene.engines.groups[0].aborted == [numbers[0]]


def test_a_replica_that_finishes_nothing_is_replaced_and_its_requests_go_to_the_others_at_once() -> None:
    scene = Scene(2)
    scene.add(999, 150)
    while not scene.engines.restarted:
        scene.pump.turn()
    assert scene.engines.restarted == [(LIMITS.sample_limit_s, 0)]
    assert scene.came == [(150, 150)]
    scene.pump.turn(0.1)
    assert scene.engines.groups[1].submitted[-1] == (LIMITS.sample_limit_s, [999])
    assert scene.pump.num_resent == 1
    with pytest.raises(RunError, match="too many"):  # nobody can write it
        scene.run()


def test_who_holds_it_finds_no_call_under_way_and_nothing_is_lost() -> None:
    scene = Scene(2)
    scene.add(20, 30, 40)
    scene.pump.turn(wait_s=2.0)
    scene.pump.hold()
    assert scene.clock.now_s < 2.1
    assert all(engine._call is not None and engine._call.ended for engine in scene.engines.groups)
    scene.clock.now_s += 100.0  # somebody else's work
    assert scene.run() == [(102, 20), (102, 40), (102, 30)]
    assert [prompts for engine in scene.engines.groups for _, prompts in engine.submitted] == [[20, 40], [30]]


def test_a_replica_that_somebody_else_replaced_gets_its_requests_again() -> None:
    scene = Scene(2)
    scene.add(20, 30)
    scene.pump.turn(wait_s=2.0)
    scene.pump.hold()
    scene.engines.groups[0] = Engine(scene.clock)  # in a push, which also gave it the weights
    assert scene.run() == [(22, 20), (30, 30)]
    assert scene.pump.num_resent == 1
