"""Runners of episodes: engines generate turns of some episodes while others wait for their environments.

begin -> a turn at an engine <-> waiting for the environment, or for an agent program -> deliver
^                                             |
+--------- its process was lost --------------+
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megarl.agents.episode import (
    AnswerTurn,
    Episode,
    EpisodeLimits,
    TurnPosition,
    WriteTurn,
)
from megarl.agents.trajectory import Sample, Trajectory
from megarl.endpoint.session import (
    DroppedRequest,
    SampleOrder,
    SampleRequest,
    SessionEnd,
    SessionOrder,
)
from megarl.machine.errors import RunError
from megarl.rollout.driver.scheduler import Deliver, OnFailure, RequestScheduler, RequestState
from megarl.rollout.episodes.environments import Environments
from megarl.rollout.interface import GenerationRequest
from megarl.rollout.worker.environment import EpisodeReport, TurnReport

_TURN_S = 0.02  # the longest wait for engines while environments work, and vice versa
_log = logging.getLogger(__name__)


@dataclass
class _Running:
    """An episode in progress.

    Attributes:
        request: Its prompt, sampling and seed, as for its first turn, and its task.
        deliver: Called with the replica of the last turn and the trajectory when it has ended.
        on_failure: Called if it cannot be finished.
        is_first: Whether it has priority over other requests.
        begun_s: When it began.
        episode: Its state; None for an agent program, which has it in its process.
        attempt: Number of restarts after its process was lost.
        turns: The scheduler's number of each turn that an engine generates. An agent program may ask for
            several, by the numbers of its requests; an episode of tools has one, 0.
        replica: Replica that generated the last turn.
        waits_since_s: Since when no engine works for it; None while one does.
        waited_s: How long no engine worked for it before that.
    """

    request: GenerationRequest
    deliver: Deliver[Trajectory]
    on_failure: OnFailure | None
    is_first: bool
    begun_s: float
    episode: Episode | None = None
    attempt: int = 0
    turns: dict[int, int] = field(default_factory=dict)
    replica: int | None = None
    waits_since_s: float | None = None
    waited_s: float = 0.0


class EpisodeRunner(ABC):
    """Runs episodes as RequestScheduler runs requests. The scheduler runs the turns of the episodes.

    Args:
        scheduler: The scheduler of requests to engines.
        environments: The processes of the environments, or of the programs.
        limits: The limits of an episode.
        clock: Has the semantics of time.monotonic.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        environments: Environments,
        limits: EpisodeLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.environments = environments
        self._limits = limits
        self._clock = clock
        self._waited_s = self._played_s = 0.0  # for episodes that have ended since `drain_metrics`
        self._numbers = itertools.count()  # Numbers are never reused, so that late answers are recognized.
        self._running: dict[int, _Running] = {}

    @property
    def is_at_work(self) -> bool:
        return self.scheduler.is_at_work or self.environments.is_busy

    def begin(
        self,
        requests: Sequence[GenerationRequest],
        delivers: Sequence[Deliver[Trajectory]],
        *,
        on_failure: OnFailure | None = None,
        first: bool = False,
    ) -> list[int]:
        """Start one episode per request, which is that of the episode's first turn and has its task.

        `on_failure` and `first` have the meaning of RequestScheduler.begin. Later turns have priority over
        all first turns.

        Returns:
            Numbers by which the episodes can be cancelled.
        """
        numbers = []
        for request, deliver in zip(requests, delivers, strict=True):
            number = next(self._numbers)
            self._running[number] = _Running(request, deliver, on_failure, first, self._clock())
            numbers.append(number)
            self._start(number)

        return numbers

    def cancel(self, numbers: Collection[int]) -> None:
        """Cancel episodes. Finished episodes are ignored."""
        for number in numbers:
            running = self._running.pop(number, None)
            if running is not None:
                # The episode is either at an engine or at its environment; cancel it at both.
                self.scheduler.cancel(running.turns.values())
                self.environments.end(number)

    def poll(self, wait_s: float = float("inf")) -> None:
        """Wait at most about `wait_s` for an engine or an environment to answer, and continue the episodes.

        Raises:
            RunError: An episode was started too often. Errors of RequestScheduler.poll and Environments.poll
                are raised as well.
        """
        # If both sides have work, neither may block the other for longer than one short turn.
        both = min(wait_s, _TURN_S)
        self.scheduler.poll(both if self.environments.is_busy else wait_s)
        reports, lost = self.environments.poll(0.0 if self.scheduler.is_at_work else both)

        for report in reports:
            # It may have been cancelled in the meantime.
            if report.episode in self._running:
                self._advance_by(report)

        # Episodes whose process died start again from their prompt.
        for number in lost:
            if number in self._running:
                self._restart(number)

    def snapshot(self) -> tuple[list[RequestState], list[tuple[str, int, float]]]:
        """Return the result of RequestScheduler.snapshot, with the episodes for which no engine works.

        Thread-safe.
        """
        requests, replicas = self.scheduler.snapshot()
        now_s = self._clock()

        # Copy first: the polling thread may change the dictionary.
        since = [(running.request.uid, running.waits_since_s) for running in list(self._running.values())]
        requests += [
            RequestState(uid, None, now_s - since_s, waits_for_tools=True)
            for uid, since_s in since
            if since_s is not None
        ]

        return sorted(requests, key=lambda one: -one.seconds), replicas

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of RequestScheduler.drain_metrics and those of the environments.

        `agent/num_restarts` counts the restarted environment processes of this run. `agent/waiting_share` is
        the share of the time of ended episodes in which no engine worked for them.
        """
        metrics = self.scheduler.drain_metrics()
        metrics["agent/num_restarts"] = float(self.environments.num_restarts)
        if self._played_s:
            metrics["agent/waiting_share"] = self._waited_s / self._played_s
        self._waited_s = self._played_s = 0.0
        return metrics

    @abstractmethod
    def _start(self, number: int) -> None:
        """Start an episode."""

    @abstractmethod
    def _advance_by(self, report: EpisodeReport) -> None:
        """Continue a running episode after a report of its process."""

    @abstractmethod
    def _lost(self, number: int) -> str:
        """Describe the last loss of an episode that is not started again."""

    def _generate(
        self,
        running: _Running,
        token_ids: list[int],
        max_new_tokens: int,
        seed: int,
        deliver: Deliver[Sample],
    ) -> int:
        """Have a turn generated, and return the scheduler's number of it."""
        sampling = replace(running.request.sampling, max_new_tokens=max_new_tokens, seed=seed)
        turn = running.request._replace(prompt=token_ids, sampling=sampling, task=None)

        # Prefer the replica of the last turn, whose prefix cache contains the episode so far.
        (number,) = self.scheduler.begin(
            [turn],
            [deliver],
            on_failure=running.on_failure,
            first=running.is_first,
            prefer=running.replica,
        )
        return number

    def _end_wait(self, running: _Running) -> None:
        if running.waits_since_s is not None:
            running.waited_s += self._clock() - running.waits_since_s
            running.waits_since_s = None

    def _end(self, number: int, trajectory: Trajectory) -> None:
        # Remove it before its callback, which may begin others.
        running = self._running.pop(number)
        self.scheduler.cancel(running.turns.values())
        self.environments.end(number)
        self._waited_s += running.waited_s
        self._played_s += self._clock() - running.begun_s

        running.deliver(-1 if running.replica is None else running.replica, trajectory)

    def _restart(self, number: int) -> None:
        running = self._running[number]
        self.scheduler.cancel(running.turns.values())

        # The replica is no longer preferred: the new attempt shares only the prompt with its cache.
        running.turns = {}
        running.replica = running.waits_since_s = None

        running.attempt += 1
        if running.attempt < self._limits.max_attempts:
            self._start(number)
            return
        why = self._lost(number)
        if running.on_failure is None:
            raise RunError(f"the episode of prompt {running.request.uid}: {why}")
        running.on_failure(why)


class TurnRunner(EpisodeRunner):
    """Runs episodes whose turns environments answer, see Episode."""

    def _start(self, number: int) -> None:
        running = self._running[number]
        seed = running.request.sampling.seed
        running.episode = Episode(running.request.prompt, seed, self._limits, running.attempt)
        self._advance(number)

    def _lost(self, number: int) -> str:
        turn = self._episode(number).trajectory.num_turns
        return (
            f"the environment was lost {self._limits.max_attempts} times, in turn {turn}; see the output of "
            "its process above"
        )

    def _advance_by(self, report: EpisodeReport) -> None:
        assert isinstance(report, TurnReport)
        self._end_wait(self._running[report.episode])
        episode = self._episode(report.episode)

        # A late answer of an earlier attempt does not advance the episode.
        if (
            episode.timed_out(report.place)
            if report.reply is None
            else episode.answered(report.place, report.token_ids, report.reply)
        ):
            self._advance(report.episode)

    def _episode(self, number: int) -> Episode:
        episode = self._running[number].episode
        assert episode is not None, "it was started"
        return episode

    def _advance(self, number: int) -> None:
        running = self._running[number]
        episode = self._episode(number)
        step = episode.next

        if isinstance(step, WriteTurn):
            deliver = partial(self._wrote, number, step.place)
            running.turns[0] = self._generate(
                running, step.token_ids, step.max_new_tokens, step.seed, deliver
            )
        elif isinstance(step, AnswerTurn):
            running.waits_since_s = self._clock()
            # After a restart, the episode begins with its first turn again.
            _, turn = step.place
            task = running.request.task if turn == 0 else None
            self.environments.order(step._replace(episode=number, task=task))
        else:
            assert running.replica is not None, "the model has written"
            self._end(number, episode.trajectory)

    def _wrote(self, number: int, place: TurnPosition, replica: int, sample: Sample) -> None:
        running = self._running[number]
        running.turns = {}
        running.replica = replica

        if self._episode(number).wrote(place, sample):
            self._advance(number)


class SessionRunner(EpisodeRunner):
    """Runs the episodes of agent programs, which run in the processes and ask for turns."""

    def _start(self, number: int) -> None:
        running = self._running[number]
        running.waits_since_s = self._clock()
        assert running.request.task is not None, "the request of an episode has its task"
        self.environments.order(SessionOrder(number, running.request.task, running.request.prompt))

    def _lost(self, number: int) -> str:
        most = self._limits.max_attempts
        return f"the process of its agent program was lost {most} times; see its output above"

    def _advance_by(self, report: EpisodeReport) -> None:
        running = self._running[report.episode]
        match report:
            case SampleRequest(_, request, token_ids, max_new_tokens, seed):
                self._end_wait(running)
                running.turns[request] = self._generate(
                    running, token_ids, max_new_tokens, seed, partial(self._wrote, running, report)
                )
            case DroppedRequest(_, request) if request in running.turns:
                self.scheduler.cancel([running.turns[request]])
                self._ended_turn(running, request)
            case SessionEnd(number, trajectory, why):
                if trajectory.failure is not None:
                    _log.warning(
                        "the agent program of prompt %s failed (%s): %s",
                        running.request.uid,
                        trajectory.failure,
                        why,
                    )
                self._end(number, trajectory)

    def _wrote(self, running: _Running, asked: SampleRequest, replica: int, sample: Sample) -> None:
        running.replica = replica
        self._ended_turn(running, asked.request)
        self.environments.order(SampleOrder(asked.episode, asked.request, sample))

    def _ended_turn(self, running: _Running, request: int) -> None:
        running.turns.pop(request, None)
        if not running.turns:
            running.waits_since_s = self._clock()
