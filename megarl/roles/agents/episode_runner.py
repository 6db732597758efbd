"""Episodes that are under way: engines write their turns and environments answer them, at the same time, of different episodes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megarl.agents.episode import AnswerTurn, Episode, EpisodeGivenUpError, EpisodeLimits, TurnPlace, WriteTurn
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Trajectory
from megarl.machine.errors import RunError
from megarl.roles.agents.environments import Environments
from megarl.roles.rollout.scheduler import GiveUp, Pump, RequestState
from megarl.rollout.interface import FinishedRequest, GenerationRequest
from megarl.workers.environment import TurnOrder

_TURN_S = 0.02  # that engines are waited for while environments work, and the other way round

End = Callable[[int, Trajectory], None]  # the replica that wrote last, and what has been written


@dataclass
class _Play:
    """begun_s: by the clock. asked: the number of the turn that an engine is to write, as the pump has it. replica: that wrote last.
    waits_since_s: for an answer; None where it waits for none. waited_s: before."""

    episode: Episode
    request: GenerationRequest
    task: Task
    end: End
    give_up: GiveUp | None
    is_first: bool
    begun_s: float
    asked: int | None = None
    replica: int | None = None
    waits_since_s: float | None = None
    waited_s: float = 0.0


class Playing:
    """As Pump, of episodes in the place of requests; of turns it is the pump that has them. clock: as time.monotonic."""

    def __init__(self, pump: Pump, environments: Environments, limits: EpisodeLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._pump, self._environments, self._limits, self._clock = pump, environments, limits, clock
        self._waited_s = self._played_s = 0.0  # of the episodes that have ended since `drain_wait`
        self._numbers = itertools.count()  # of episodes, never used twice, so that what comes late is known
        self._plays: dict[int, _Play] = {}

    @property
    def is_at_work(self) -> bool:
        return self._pump.is_at_work or self._environments.is_busy

    def begin(
        self,
        requests: Sequence[GenerationRequest],
        tasks: Sequence[Task],
        ends: Sequence[End],
        *,
        give_up: GiveUp | None = None,
        first: bool = False,
    ) -> list[int]:
        """One for each request, which is of its first turn. give_up, first: see Pump.add; later turns go before all first ones.

        Returns the numbers under which they can be taken back.
        """
        numbers = []
        for request, task, end in zip(requests, tasks, ends, strict=True):
            number = next(self._numbers)
            episode = Episode(request.prompt, request.sampling.seed, self._limits)
            self._plays[number] = _Play(episode, request, task, end, give_up, first, self._clock())
            numbers.append(number)
            self._advance(number)
        return numbers

    def take_back(self, numbers: Collection[int]) -> None:
        """They are wanted no more; those that are over are not meant."""
        for number in numbers:
            play = self._plays.pop(number, None)
            if play is not None:
                self._pump.take_back([] if play.asked is None else [play.asked])
                self._environments.end(number)

    def turn(self, wait_s: float = float("inf")) -> None:
        """Waits at most about `wait_s` for an engine or an environment to say something.

        Raises as Pump.turn and Environments.turn; RunError for an episode that was begun too often."""
        both = min(wait_s, _TURN_S)
        self._pump.turn(both if self._environments.is_busy else wait_s)
        reports, lost = self._environments.turn(0.0 if self._pump.is_at_work else both)
        for report in reports:
            play = self._plays.get(report.episode)
            if play is None:  # it was taken back meanwhile
                continue
            episode = play.episode
            if play.waits_since_s is not None:
                play.waited_s += self._clock() - play.waits_since_s
                play.waits_since_s = None
            if episode.timed_out(report.place) if report.answer is None else episode.answered(report.place, report.answer):
                self._advance(report.episode)
        for number in lost:
            if number in self._plays:
                self._begin_again(number)

    def waiting(self) -> list[RequestState]:
        """Episodes that wait for an answer. Any thread may ask."""
        now_s, plays = self._clock(), list(self._plays.values())
        since = [(play.request.uid, play.waits_since_s) for play in plays]
        return [RequestState(uid, None, now_s - since_s, waits_for_tools=True) for uid, since_s in since if since_s is not None]

    def drain_wait(self) -> float | None:
        """The share of their time for which episodes have waited for answers, of those that have ended since the last time; None where
        there are none."""
        share = self._waited_s / self._played_s if self._played_s else None
        self._waited_s = self._played_s = 0.0
        return share

    def _advance(self, number: int) -> None:
        play = self._plays[number]
        step = play.episode.next
        if isinstance(step, WriteTurn):
            sampling = replace(play.request.sampling, max_new_tokens=step.max_new_tokens, seed=step.seed)
            turn = play.request._replace(prompt=step.token_ids, sampling=sampling)
            deliver = partial(self._wrote, number, step.place)
            (play.asked,) = self._pump.add([turn], deliver, give_up=play.give_up, first=play.is_first, prefer=play.replica)
        elif isinstance(step, AnswerTurn):
            play.waits_since_s = self._clock()
            self._environments.order(TurnOrder(number, play.task, step))
        else:
            self._environments.end(number)
            del self._plays[number]
            self._waited_s += play.waited_s
            self._played_s += self._clock() - play.begun_s
            assert play.replica is not None, "the model has written"
            play.end(play.replica, play.episode.trajectory)

    def _wrote(self, number: int, place: TurnPlace, replica: int, finished: FinishedRequest) -> None:
        play, sample = self._plays[number], finished.sample
        play.asked, play.replica = None, replica
        if play.episode.wrote(place, sample.token_ids, sample.log_probs, sample.token_versions, sample.finish_reason):
            self._advance(number)

    def _begin_again(self, number: int) -> None:
        play = self._plays[number]
        self._pump.take_back([] if play.asked is None else [play.asked])
        play.asked = play.replica = play.waits_since_s = None
        try:
            play.episode.lost_environment(play.episode.attempt)
        except EpisodeGivenUpError as error:
            why = f"{error}; see the words of its process above"
            if play.give_up is None:
                raise RunError(f"the episode of prompt {play.request.uid}: {why}") from error
            play.give_up(why)
            return
        self._advance(number)
