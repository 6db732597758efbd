"""An episode as a state machine: what is to happen next, and what follows from what has happened. It starts
nothing and has no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megarl.agents.protocol import CallError
from megarl.agents.trajectory import Author, EpisodeEnd, Segment, Trajectory


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """max_turns: of the model. max_tokens: of all that comes after the prompt, whoever writes it.
    max_turn_tokens: of one turn; None: as many as there is room for. max_attempts: times that an episode is
    begun whose environment is lost."""

    max_turns: int
    max_tokens: int
    max_turn_tokens: int | None = None
    max_attempts: int = 2


class TurnPosition(NamedTuple):
    """Where an episode stands. What is asked for carries it, and what comes back must: what comes late is
    known by it."""

    attempt: int
    turn: int


class WriteTurn(NamedTuple):
    """The model is to write on from `token_ids`, at most `max_new_tokens`. seed: of its draws."""

    place: TurnPosition
    token_ids: list[int]
    max_new_tokens: int
    seed: int


class AnswerTurn(NamedTuple):
    """The environment is to say something to what the model wrote. is_last: no turn can follow."""

    place: TurnPosition
    token_ids: list[int]
    is_last: bool


class TurnAnswer(NamedTuple):
    """What the environment said. token_ids: from behind the turn to where the next begins, empty where it is
    done. reward, is_done, num_calls, errors, tool_s: see Reply."""

    token_ids: Sequence[int]
    reward: float = 0.0
    is_done: bool = False
    num_calls: int = 0
    errors: Sequence[CallError] = ()
    tool_s: float = 0.0


class EpisodeDroppedError(RuntimeError):
    """Its environment was lost as often as it may be."""


class Episode:
    """prompt: token ids. seed: of the first turn's draws, from which those of later ones follow.

    `next` is what is to happen, None when the episode is over; then `trajectory.end` says why. An event that
    does not belong to what is awaited, because it comes late or twice, changes nothing, and the method that
    takes it returns False. What the model wrote stands in later requests as it was written, token by token.
    `attempt`: times that it was begun again.
    """

    def __init__(self, prompt: Sequence[int], seed: int, limits: EpisodeLimits) -> None:
        self._seed = seed
        self._limits = limits
        self.attempt = 0
        self.trajectory = Trajectory(prompt=prompt)
        self._num_tokens = 0

    @property
    def next(self) -> WriteTurn | AnswerTurn | None:
        written = self.trajectory
        if written.end is not None:
            return None
        place = TurnPosition(self.attempt, written.num_turns)

        if written.segments and written.segments[-1].author is Author.model:
            # The turn that awaits its answer has been counted already.
            turn = place._replace(turn=place.turn - 1)
            return AnswerTurn(
                turn,
                written.segments[-1].token_ids.tolist(),
                is_last=written.num_turns == self._limits.max_turns,
            )

        # Otherwise the model writes the next turn, within the room that is left.
        room = self._limits.max_tokens - self._num_tokens
        at_most = self._limits.max_turn_tokens
        token_ids = [*written.prompt, *written.token_ids.tolist()]

        return WriteTurn(
            place, token_ids, room if at_most is None else min(room, at_most), self._turn_seed(place.turn)
        )

    def _turn_seed(self, turn: int) -> int:
        """The first turn has the seed of a sample without an environment."""
        return (
            self._seed if turn == 0 else int(np.random.SeedSequence([self._seed, turn]).generate_state(1)[0])
        )

    def wrote(
        self,
        place: TurnPosition,
        token_ids: np.ndarray,
        log_probs: np.ndarray,
        token_versions: np.ndarray,
        finish_reason: Literal["stop", "length"],
    ) -> bool:
        """The model has written a turn. A turn that was cut ends the episode, as nothing can be put behind
        half of one."""
        awaited = self.next
        if not isinstance(awaited, WriteTurn) or awaited.place != place:
            return False
        assert 1 <= len(token_ids) <= awaited.max_new_tokens, "as it was asked for"
        segment = Segment(
            author=Author.model, token_ids=token_ids, log_probs=log_probs, token_versions=token_versions
        )
        self._add(segment)
        # The environment's answer replaces this reward.
        self.trajectory.turn_rewards.append(0.0)
        if finish_reason == "length":
            self.trajectory.end = EpisodeEnd.length

        return True

    def answered(self, place: TurnPosition, answer: TurnAnswer) -> bool:
        """The environment has answered a turn. Where its answer and one token more have no room, the episode
        ends before it."""
        awaited = self.next
        if not isinstance(awaited, AnswerTurn) or awaited.place != place:
            return False
        written = self.trajectory
        written.turn_rewards[-1] = answer.reward
        written.num_calls += answer.num_calls
        written.call_errors.update(error.kind for error in answer.errors)
        written.tool_s += answer.tool_s

        if answer.is_done:
            written.end = EpisodeEnd.done
        elif awaited.is_last:
            written.end = EpisodeEnd.turns
        elif self._num_tokens + len(answer.token_ids) >= self._limits.max_tokens:
            written.end = EpisodeEnd.length
        else:
            self._add(Segment.of_environment(answer.token_ids))

        return True

    def timed_out(self, place: TurnPosition) -> bool:
        """The answer to a turn takes too long: the episode ends with that turn."""
        awaited = self.next
        if not isinstance(awaited, AnswerTurn) or awaited.place != place:
            return False
        self.trajectory.end = EpisodeEnd.time
        return True

    def lost_environment(self, attempt: int) -> bool:
        """The environment of that attempt is gone, with what it remembered: the episode restarts, with the
        same seeds.

        Raises EpisodeDroppedError where it has begun `max_attempts` times.
        """
        if self.trajectory.end is not None or attempt != self.attempt:
            return False
        if self.attempt + 1 >= self._limits.max_attempts:
            raise EpisodeDroppedError(
                f"the environment was lost {self._limits.max_attempts} times, in turn "
                f"{self.trajectory.num_turns}"
            )

        # Keep only the prompt; by the attempt's number, late events of the old one are recognized.
        self.attempt += 1
        self.trajectory = Trajectory(prompt=self.trajectory.prompt)
        self._num_tokens = 0

        return True

    def _add(self, segment: Segment) -> None:
        self.trajectory.segments.append(segment)
        self._num_tokens += len(segment)
