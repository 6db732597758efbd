"""Test the request scheduler with fake replicas in virtual time: late, cancelled and lost requests, and
pauses."""

from __future__ import annotations

from functools import partial

import pytest

from megarl.agents.trajectory import Sample
from megarl.machine.errors import RunError
from megarl.rehearse.simulation.engines import ScriptedEngine, ScriptedEngines, VirtualClock
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.interface import GenerationRequest, SamplingParameters

LIMITS = {"max_concurrency": 2, "answer_limit_s": 60, "sample_limit_s": 200}


def length_of(request: GenerationRequest) -> int:
    return request.prompt[0]


def prompts(engine: ScriptedEngine) -> list[tuple[float, list[int]]]:
    """Return the prompts that the engine received, and when."""
    return [(at_s, [request.prompt[0] for request in requests]) for at_s, requests in engine.submitted]


class Scene:
    def __init__(self, num_replicas: int) -> None:
        self.clock = VirtualClock()
        self.engines = ScriptedEngines(self.clock, num_replicas, length_of, restart_limit=2)
        self.came: list[tuple[float, int]] = []  # when, and the request
        self.scheduler = RequestScheduler(
            self.engines, self._readmit, **LIMITS, clock=lambda: self.clock.now_s, wait=self.clock.wait
        )  # type: ignore[arg-type]

    def _readmit(self, replica: int) -> bool:
        self.engines.starting.discard(replica)
        return True

    def add(self, *lengths: int, first: bool = False) -> list[int]:
        sampling = SamplingParameters(max_new_tokens=200, seed=0)
        return self.scheduler.begin(
            [GenerationRequest(length, [length], sampling) for length in lengths],
            [partial(self.deliver, length) for length in lengths],
            first=first,
        )

    def deliver(self, length: int, replica: int, sample: Sample) -> None:
        assert len(sample.token_ids) == length  # each request gets its own sample
        self.came.append((round(self.clock.now_s), length))

    def run(self) -> list[tuple[float, int]]:
        while self.scheduler.num_unfinished:
            self.scheduler.poll()
        return self.came


def test_of_replicas_that_are_up_at_the_same_time_only_those_with_room_are_admitted() -> None:
    """Both were lost; once the first has its weights and its cache, there is no room for the second."""
    scene = Scene(2)
    readmitted = list[int]()

    def can_readmit() -> bool:
        return len(scene.engines.starting) == 2

    def readmit(replica: int) -> bool:
        assert can_readmit()
        readmitted.append(replica)
        return scene._readmit(replica)

    scene.scheduler = RequestScheduler(
        scene.engines,
        readmit,
        **LIMITS,
        can_readmit=can_readmit,
        clock=lambda: scene.clock.now_s,
        wait=scene.clock.wait,
    )  # type: ignore[arg-type]
    for replica in (0, 1):
        scene.engines.restart(replica, "lost")
    scene.add(30, 40)
    scene.scheduler.poll(wait_s=0.0)
    scene.clock.pass_by(LIMITS["sample_limit_s"] / 2)  # nothing polls, and both start
    assert [request for _, request in scene.run()] == [30, 40]
    assert (readmitted, scene.engines.starting) == ([0], {1})


def test_requests_added_during_a_call_do_not_wait_for_it() -> None:
    scene = Scene(2)
    scene.add(100, 101)
    scene.scheduler.poll(wait_s=1.0)
    scene.add(50, 40)
    scene.add(60, first=True)
    assert scene.run() == [(51, 50), (61, 60), (91, 40), (100, 100), (101, 101)]
    starts = sorted(
        (round(at_s, 1), given) for engine in scene.engines.groups for at_s, given in prompts(engine)
    )
    assert starts == [(0.0, [100]), (0.0, [101]), (1.0, [50]), (1.0, [60]), (51.0, [40])]


def test_cancelled_requests_are_not_delivered_and_free_their_slots() -> None:
    scene = Scene(1)
    numbers = scene.add(100, 20, 30)
    scene.scheduler.poll(wait_s=1.0)
    scene.scheduler.cancel([numbers[0]])
    assert scene.run() == [(20, 20), (31, 30)]
    assert scene.engines.groups[0].aborted == [numbers[0]]
    scene.scheduler.cancel(numbers)  # nothing is left of the finished ones
    assert scene.engines.groups[0].aborted == [numbers[0]]


def test_a_replica_that_finishes_nothing_is_replaced_and_its_requests_go_to_the_others_at_once() -> None:
    scene = Scene(2)
    scene.add(999, 150)
    while not scene.engines.restarted:
        scene.scheduler.poll()
    assert scene.engines.restarted == [(LIMITS["sample_limit_s"], 0)]
    assert scene.came == [(150, 150)]
    scene.scheduler.poll(0.1)
    assert prompts(scene.engines.groups[1])[-1] == (LIMITS["sample_limit_s"], [999])
    assert scene.scheduler.totals().num_resent == 1
    with pytest.raises(RunError, match="too many"):  # no replica can write it
        scene.run()


def test_a_sample_that_cannot_be_written_ends_the_run_or_is_given_up() -> None:
    scene = Scene(1)
    failed = list[str]()
    request = GenerationRequest(7, [0], SamplingParameters(max_new_tokens=200, seed=0), "a")
    scene.scheduler.begin([request], [partial(scene.deliver, 7)], on_failure=failed.append)
    scene.add(20)
    assert scene.run() == [(20, 20)]
    assert failed == ["scripted"]
    scene.scheduler.begin([request], [partial(scene.deliver, 7)])
    with pytest.raises(RunError, match="rollout replica 0 cannot write a sample of prompt a: scripted"):
        scene.run()


def test_a_paused_scheduler_has_no_call_in_progress_and_loses_no_request() -> None:
    scene = Scene(2)
    scene.add(20, 30, 40)
    scene.scheduler.poll(wait_s=2.0)
    scene.scheduler.pause()
    assert scene.clock.now_s < 2.1
    assert not any(engine.is_at_call for engine in scene.engines.groups)
    scene.clock.now_s += 100.0  # time spent elsewhere
    assert scene.run() == [(102, 20), (102, 40), (102, 30)]
    assert [given for engine in scene.engines.groups for _, given in prompts(engine)] == [[20, 40], [30]]


def test_replicas_join_and_leave_and_no_request_is_lost() -> None:
    scene = Scene(1)
    scene.add(20, 30, 40, 50)
    scene.scheduler.poll(wait_s=2.0)
    scene.scheduler.pause()
    scene.engines.groups.append(ScriptedEngine(scene.clock, length_of, 1, 5.0))
    scene.engines.starting.add(1)
    scene.scheduler.resize()
    assert [(state, in_flight) for state, in_flight, _ in scene.scheduler.snapshot()[1]] == [
        ("generating", 2),
        ("starting", 0),
    ]
    while scene.clock.now_s < 12:
        scene.scheduler.poll(wait_s=1.0)
    given = [
        [number for _, numbers in prompts(engine) for number in numbers] for engine in scene.engines.groups
    ]
    assert given == [[20, 30], [40, 50]]
    scene.scheduler.pause()
    scene.engines.groups.pop()
    scene.scheduler.resize()
    assert [request_id for _, request_id in scene.run()] == [20, 30, 40, 50]
    assert scene.scheduler.totals().num_resent == 2
    assert scene.scheduler.totals().num_tokens == [140, 0]


def test_a_replica_that_somebody_else_replaced_gets_its_requests_again() -> None:
    scene = Scene(2)
    scene.add(20, 30)
    scene.scheduler.poll(wait_s=2.0)
    scene.scheduler.pause()

    # in a weight sync, which also sent it the weights
    scene.engines.groups[0] = ScriptedEngine(scene.clock, length_of, version=1)
    assert scene.run() == [(22, 20), (30, 30)]
    assert scene.scheduler.totals().num_resent == 1
