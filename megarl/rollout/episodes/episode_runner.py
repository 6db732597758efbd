"""Episode runner: engines generate turns of some episodes while environments answer turns of others."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megarl.agents.episode import (
    AnswerTurn,
    Episode,
    EpisodeDroppedError,
    EpisodeLimits,
    TurnPosition,
    WriteTurn,
)
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Trajectory
from megarl.machine.errors import RunError
from megarl.rollout.driver.scheduler import Deliver, OnFailure, RequestScheduler, RequestState
from megarl.rollout.episodes.environments import Environments
from megarl.rollout.interface import GenerationRequest, Sample
from megarl.rollout.worker.environment import TurnOrder, TurnReport

_TURN_S = 0.02  # the longest wait for engines while environments work, and vice versa


@dataclass
class _RunningEpisode:
    """An episode in progress.

    Attributes:
        episode: State of the episode.
        request: Request of its first turn.
        task: Task for its environment.
        deliver: Called with the replica of the last turn and the trajectory when it has ended.
        on_failure: Called if it cannot be finished.
        is_first: Whether its first turn has priority over other requests.
        begun_s: When it began.
        request_number: The scheduler's number of the turn that an engine generates.
        replica: Replica that generated the last turn.
        waits_since_s: When it began to wait for an answer; None if it does not wait.
        waited_s: How long it waited before that.
    """

    episode: Episode
    request: GenerationRequest
    task: Task
    deliver: Deliver[Trajectory]
    on_failure: OnFailure | None
    is_first: bool
    begun_s: float
    request_number: int | None = None
    replica: int | None = None
    waits_since_s: float | None = None
    waited_s: float = 0.0


class EpisodeRunner:
    """Runs episodes as RequestScheduler runs requests. The scheduler runs the turns of the episodes.

    Args:
        scheduler: The scheduler of requests to engines.
        environments: The processes of the environments.
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
        self._scheduler = scheduler
        self._environments = environments
        self._limits = limits
        self._clock = clock
        self._waited_s = self._played_s = 0.0  # for episodes that have ended since `drain_wait`
        self._numbers = itertools.count()  # Numbers are never reused, so that late answers are recognized.
        self._running: dict[int, _RunningEpisode] = {}

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
        """Start one episode per request. The request is that of the episode's first turn.

        `on_failure` and `first` have the meaning of RequestScheduler.add. Later turns have priority over all
        first turns.

        Returns:
            Numbers by which the episodes can be cancelled.
        """
        numbers = []
        for request, task, deliver in zip(requests, tasks, delivers, strict=True):
            number = next(self._numbers)
            episode = Episode(request.prompt, request.sampling.seed, self._limits)
            self._running[number] = _RunningEpisode(
                episode, request, task, deliver, on_failure, first, self._clock()
            )
            numbers.append(number)
            self._advance(number)

        return numbers

    def cancel(self, numbers: Collection[int]) -> None:
        """Cancel episodes. Finished episodes are ignored."""
        for number in numbers:
            running = self._running.pop(number, None)
            if running is not None:
                # The episode is either at an engine or at its environment; cancel it at both.
                self._scheduler.cancel([] if running.request_number is None else [running.request_number])
                self._environments.end(number)

    def poll(self, wait_s: float = float("inf")) -> None:
        """Wait at most about `wait_s` for an engine or an environment to answer, and continue the episodes.

        Raises:
            RunError: An episode was started too often. Errors of RequestScheduler.poll and Environments.poll
                are raised as well.
        """
        # If both sides have work, neither may block the other for longer than one short turn.
        both = min(wait_s, _TURN_S)
        self._scheduler.poll(both if self._environments.is_busy else wait_s)
        reports, lost = self._environments.poll(0.0 if self._scheduler.is_at_work else both)

        # Advance the episodes that were answered.
        for report in reports:
            assert isinstance(report, TurnReport)
            running = self._running.get(report.episode)
            if running is None:  # it was cancelled in the meantime
                continue
            episode = running.episode
            if running.waits_since_s is not None:
                running.waited_s += self._clock() - running.waits_since_s
                running.waits_since_s = None
            # A late answer of an earlier attempt does not advance the episode.
            if (
                episode.timed_out(report.place)
                if report.reply is None
                else episode.answered(report.place, report.token_ids, report.reply)
            ):
                self._advance(report.episode)

        # Episodes whose environment died start again from their prompt.
        for number in lost:
            if number in self._running:
                self._restart(number)

    def waiting(self) -> list[RequestState]:
        """Return the episodes that wait for an answer. Thread-safe."""
        now_s = self._clock()

        # Copy first: the polling thread may change the dictionary.
        all_running = list(self._running.values())
        since = [(running.request.uid, running.waits_since_s) for running in all_running]

        return [
            RequestState(uid, None, now_s - since_s, waits_for_tools=True)
            for uid, since_s in since
            if since_s is not None
        ]

    def drain_wait(self) -> float | None:
        """Return the share of time that episodes ended since the last call spent waiting for answers.

        The result is None if no episode has ended.
        """
        share = self._waited_s / self._played_s if self._played_s else None
        self._waited_s = self._played_s = 0.0
        return share

    def _advance(self, number: int) -> None:
        running = self._running[number]
        step = running.episode.next

        if isinstance(step, WriteTurn):
            sampling = replace(running.request.sampling, max_new_tokens=step.max_new_tokens, seed=step.seed)
            turn = running.request._replace(prompt=step.token_ids, sampling=sampling)
            # Prefer the replica of the last turn, whose prefix cache contains the episode so far.
            (running.request_number,) = self._scheduler.add(
                [turn],
                [partial(self._wrote, number, step.place)],
                on_failure=running.on_failure,
                first=running.is_first,
                prefer=running.replica,
            )
        elif isinstance(step, AnswerTurn):
            running.waits_since_s = self._clock()
            # After a restart, the episode begins with its first turn again.
            task = running.task if step.place.turn == 0 else None
            self._environments.order(TurnOrder(number, task, step))
        else:
            # The episode is over. Remove it before its callback, which may begin others.
            self._environments.end(number)
            del self._running[number]
            self._waited_s += running.waited_s
            self._played_s += self._clock() - running.begun_s
            assert running.replica is not None, "the model has written"
            running.deliver(running.replica, running.episode.trajectory)

    def _wrote(self, number: int, place: TurnPosition, replica: int, sample: Sample) -> None:
        running = self._running[number]
        running.request_number = None
        running.replica = replica

        if running.episode.wrote(
            place, sample.token_ids, sample.log_probs, sample.token_versions, sample.finish_reason
        ):
            self._advance(number)

    def _restart(self, number: int) -> None:
        running = self._running[number]
        self._scheduler.cancel([] if running.request_number is None else [running.request_number])

        # The replica is no longer preferred: the new attempt shares only the prompt with its cache.
        running.request_number = running.replica = running.waits_since_s = None

        try:
            running.episode.lost_environment(running.episode.attempt)
        except EpisodeDroppedError as error:
            why = f"{error}; see the output of its process above"
            if running.on_failure is None:
                raise RunError(f"the episode of prompt {running.request.uid}: {why}") from error
            running.on_failure(why)
            return

        self._advance(number)
