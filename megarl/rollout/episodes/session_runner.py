"""Session runner: agent programs run in environment processes, and engines generate their turns."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megarl.agents.protocol import Task
from megarl.agents.trajectory import Trajectory
from megarl.endpoint.session import SampledTurn
from megarl.endpoint.session_messages import (
    DroppedRequest,
    SampleOrder,
    SampleRequest,
    SessionEnd,
    SessionOrder,
)
from megarl.machine.errors import RunError
from megarl.rollout.driver.scheduler import Deliver, OnFailure, RequestScheduler, RequestState
from megarl.rollout.episodes.environments import Environments
from megarl.rollout.interface import GenerationRequest, Sample

_TURN_S = 0.02  # the longest wait for engines while programs run, and vice versa
_log = logging.getLogger(__name__)


@dataclass
class _RunningSession:
    """An episode in progress.

    Attributes:
        request: The request of the sample: its prompt, sampling and seed.
        task: What the episode is about.
        deliver: Called with the replica of the last turn and the trajectory when it has ended.
        on_failure: Called if it cannot be finished.
        is_first: Whether its turns have priority over other requests.
        begun_s: When it began.
        attempt: Number of restarts after its process was lost.
        turns: The scheduler's number of each turn that an engine generates, by the number of the request.
        replica: Replica that generated the last turn.
        idle_since_s: When its last turn ended; None while an engine generates one.
        waited_s: How long no engine worked for it before that.
    """

    request: GenerationRequest
    task: Task
    deliver: Deliver[Trajectory]
    on_failure: OnFailure | None
    is_first: bool
    begun_s: float
    attempt: int = 0
    turns: dict[int, int] = field(default_factory=dict)
    replica: int | None = None
    idle_since_s: float | None = None
    waited_s: float = 0.0


class SessionRunner:
    """Runs the episodes of agent programs as EpisodeRunner runs those of environments.

    Args:
        scheduler: The scheduler of requests to engines.
        environments: The processes of the programs.
        max_attempts: Times an episode is started, counting restarts after its process was lost.
        clock: Has the semantics of time.monotonic.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        environments: Environments,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._environments = environments
        self._max_attempts = max_attempts
        self._clock = clock
        self._waited_s = self._played_s = 0.0  # for episodes that have ended since `drain_wait`
        self._numbers = itertools.count()  # Numbers are never reused, so that late reports are recognized.
        self._running: dict[int, _RunningSession] = {}

    @property
    def is_at_work(self) -> bool:
        return self._scheduler.is_at_work or self._environments.is_busy

    def begin(
        self,
        requests: Sequence[GenerationRequest],
        tasks: Sequence[Task],
        delivers: Sequence[Deliver[Trajectory]],
        *,
        on_failure: OnFailure | None = None,
        first: bool = False,
    ) -> list[int]:
        """Start one program per request; see EpisodeRunner.begin."""
        numbers = []
        for request, task, deliver in zip(requests, tasks, delivers, strict=True):
            number = next(self._numbers)
            now_s = self._clock()
            self._running[number] = _RunningSession(
                request, task, deliver, on_failure, first, now_s, idle_since_s=now_s
            )
            self._environments.order(SessionOrder(number, task, request.prompt))
            numbers.append(number)

        return numbers

    def cancel(self, numbers: Collection[int]) -> None:
        """Cancel episodes. Finished episodes are ignored."""
        for number in numbers:
            running = self._running.pop(number, None)
            if running is not None:
                self._scheduler.cancel(running.turns.values())
                self._environments.end(number)

    def poll(self, wait_s: float = float("inf")) -> None:
        """Wait at most about `wait_s` for an engine or a program, and continue the episodes.

        Raises:
            RunError: An episode was started too often. Errors of RequestScheduler.poll and Environments.poll
                are raised as well.
        """
        # If both sides have work, neither may block the other for longer than one short turn.
        both = min(wait_s, _TURN_S)
        self._scheduler.poll(both if self._environments.is_busy else wait_s)
        reports, lost = self._environments.poll(0.0 if self._scheduler.is_at_work else both)

        for report in reports:
            running = self._running.get(report.episode)
            if running is None:  # it was cancelled in the meantime
                continue
            if isinstance(report, SampleRequest):
                self._generate(running, report)
            elif isinstance(report, DroppedRequest):
                self._drop(running, report)
            elif isinstance(report, SessionEnd):
                self._finish(running, report)

        # Episodes whose process died start again.
        for number in lost:
            if number in self._running:
                self._restart(number)

    def waiting(self) -> list[RequestState]:
        """Return the episodes for which no engine works. Thread-safe."""
        now_s = self._clock()

        # Copy first: the polling thread may change the dictionary.
        since = [(running.request.uid, running.idle_since_s) for running in list(self._running.values())]
        return [
            RequestState(uid, None, now_s - since_s, waits_for_tools=True)
            for uid, since_s in since
            if since_s is not None
        ]

    def drain_wait(self) -> float | None:
        """Return the share of time in which no engine worked for an episode; see EpisodeRunner.drain_wait."""
        share = self._waited_s / self._played_s if self._played_s else None
        self._waited_s = self._played_s = 0.0
        return share

    def _generate(self, running: _RunningSession, asked: SampleRequest) -> None:
        if running.idle_since_s is not None:
            running.waited_s += self._clock() - running.idle_since_s
            running.idle_since_s = None
        sampling = replace(running.request.sampling, max_new_tokens=asked.max_new_tokens, seed=asked.seed)
        turn = running.request._replace(prompt=asked.token_ids, sampling=sampling)

        # Prefer the replica of the last turn, whose prefix cache contains the episode so far.
        (running.turns[asked.request],) = self._scheduler.add(
            [turn],
            [partial(self._wrote, running, asked)],
            on_failure=running.on_failure,
            first=running.is_first,
            prefer=running.replica,
        )

    def _wrote(self, running: _RunningSession, asked: SampleRequest, replica: int, sample: Sample) -> None:
        running.replica = replica
        self._ended_turn(running, asked.request)
        written = SampledTurn(sample.token_ids, sample.log_probs, sample.token_versions, sample.finish_reason)
        self._environments.order(SampleOrder(asked.episode, asked.request, written))

    def _drop(self, running: _RunningSession, dropped: DroppedRequest) -> None:
        number = running.turns.get(dropped.request)
        if number is not None:
            self._scheduler.cancel([number])
            self._ended_turn(running, dropped.request)

    def _ended_turn(self, running: _RunningSession, request: int) -> None:
        running.turns.pop(request, None)
        if not running.turns:
            running.idle_since_s = self._clock()

    def _finish(self, running: _RunningSession, ended: SessionEnd) -> None:
        # Remove it before its callback, which may begin others.
        del self._running[ended.episode]
        self._scheduler.cancel(running.turns.values())
        self._environments.end(ended.episode)
        self._waited_s += running.waited_s
        self._played_s += self._clock() - running.begun_s

        if ended.trajectory.failure is not None:
            _log.warning(
                "the agent program of prompt %s failed (%s): %s",
                running.request.uid,
                ended.trajectory.failure,
                ended.why,
            )
        running.deliver(-1 if running.replica is None else running.replica, ended.trajectory)

    def _restart(self, number: int) -> None:
        running = self._running[number]
        self._scheduler.cancel(running.turns.values())
        running.turns = {}
        running.replica = None
        running.attempt += 1

        if running.attempt >= self._max_attempts:
            why = (
                f"the process of its agent program was lost {self._max_attempts} times; see its output above"
            )
            if running.on_failure is None:
                raise RunError(f"the episode of prompt {running.request.uid}: {why}")
            running.on_failure(why)
            return

        running.idle_since_s = self._clock()
        self._environments.order(SessionOrder(number, running.task, running.request.prompt))
