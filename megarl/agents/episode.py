"""The state machine of an episode: the next action, and the effect of each event.

It starts no work and reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megarl.agents.protocol import Reply, Task
from megarl.agents.trajectory import Author, EpisodeEnd, Sample, Segment, Trajectory


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """The limits of an episode.

    Attributes:
        max_turns: Model turns per episode.
        max_tokens: Tokens after the prompt, from the model and the environment together.
        max_turn_tokens: Tokens per model turn. None: limited by `max_tokens` only.
        max_attempts: Times an episode is started, counting restarts after its environment was lost.
    """

    max_turns: int
    max_tokens: int
    max_turn_tokens: int | None = None
    max_attempts: int = 2


# The attempt and the turn of an episode. Requests carry it and results return it, so late results are
# recognized.
TurnPosition = tuple[int, int]


class WriteTurn(NamedTuple):
    """A request for a turn of the model.

    The model continues from `token_ids` by at most `max_new_tokens` tokens, sampled with `seed`.
    """

    place: TurnPosition
    token_ids: list[int]
    max_new_tokens: int
    seed: int


class AnswerTurn(NamedTuple):
    """A request for the environment to reply to the model's turn.

    Attributes:
        is_last: No further turn can follow.
        episode: A number that is used only once, for a process that answers the turns of several episodes.
        task: The task of the episode for such a process, with the first turn of each attempt. Later turns
            have None, because the process keeps the environment and a task may be large.
    """

    place: TurnPosition
    token_ids: list[int]
    is_last: bool
    episode: int = 0
    task: Task | None = None


class Episode:
    """The state machine of one attempt at an episode.

    `next` is the next action, or None when the episode is over; `trajectory.end` then gives the reason. An
    event that does not match the awaited action, because it is late or a duplicate, changes nothing, and the
    method that receives it returns False. Later requests repeat the tokens that the model sampled, unchanged.

    Args:
        prompt: Token ids.
        seed: The sampling seed of the first turn. The seeds of later turns are derived from it, in every
            attempt.
        attempt: Number of earlier attempts, whose environments were lost.

    Example::

        episode = Episode(prompt, seed, EpisodeLimits(max_turns=3, max_tokens=1000))
        while (step := episode.next) is not None:
            if isinstance(step, WriteTurn):
                episode.wrote(step.place, sample(step))
            else:
                episode.answered(step.place, *await responder.answer(step))
        episode.trajectory.end
    """

    def __init__(self, prompt: Sequence[int], seed: int, limits: EpisodeLimits, attempt: int = 0) -> None:
        self._seed = seed
        self._limits = limits
        self._attempt = attempt
        self.trajectory = Trajectory(prompt=prompt)
        self._num_tokens = 0

    @property
    def next(self) -> WriteTurn | AnswerTurn | None:
        written = self.trajectory
        if written.end is not None:
            return None
        turn = written.num_turns

        if written.segments and written.segments[-1].author is Author.model:
            # num_turns already counts the turn that awaits its answer.
            token_ids = written.segments[-1].token_ids.tolist()
            return AnswerTurn((self._attempt, turn - 1), token_ids, is_last=turn == self._limits.max_turns)

        # Otherwise the model writes the next turn within the remaining token budget.
        room = self._limits.max_tokens - self._num_tokens
        at_most = self._limits.max_turn_tokens
        token_ids = [*written.prompt, *written.token_ids.tolist()]

        max_new_tokens = room if at_most is None else min(room, at_most)
        return WriteTurn((self._attempt, turn), token_ids, max_new_tokens, self._turn_seed(turn))

    def _turn_seed(self, turn: int) -> int:
        """Return the seed of a turn. The first turn uses the seed of a sample without an environment."""
        return (
            self._seed if turn == 0 else int(np.random.SeedSequence([self._seed, turn]).generate_state(1)[0])
        )

    def wrote(
        self,
        place: TurnPosition,
        sample: Sample,
    ) -> bool:
        """Record a turn of the model.

        A truncated turn ends the episode, because nothing can follow an unfinished turn.
        """
        awaited = self.next
        if not isinstance(awaited, WriteTurn) or awaited.place != place:
            return False
        assert 1 <= len(sample.token_ids) <= awaited.max_new_tokens, "a turn has 1 to max_new_tokens tokens"
        self._add(Segment.of_model(sample))
        # The environment's answer replaces this reward.
        self.trajectory.turn_rewards.append(0.0)
        if sample.finish_reason == "length":
            self.trajectory.end = EpisodeEnd.length

        return True

    def answered(self, place: TurnPosition, token_ids: Sequence[int], reply: Reply) -> bool:
        """Record the environment's answer to a turn.

        The episode ends before the answer if the answer and one more token do not fit.

        Args:
            token_ids: The tokens between the end of the turn and the start of the next one. Empty when the
                episode is done.
        """
        awaited = self.next
        if not isinstance(awaited, AnswerTurn) or awaited.place != place:
            return False

        written = self.trajectory
        written.turn_rewards[-1] = reply.reward
        written.num_calls += reply.num_calls
        written.call_errors.update(error.kind for error in reply.errors)
        written.tool_s += reply.tool_s

        if reply.is_done:
            written.end = EpisodeEnd.done
        elif awaited.is_last:
            written.end = EpisodeEnd.turns
        elif self._num_tokens + len(token_ids) >= self._limits.max_tokens:
            written.end = EpisodeEnd.length
        else:
            self._add(Segment.of_environment(token_ids))

        return True

    def timed_out(self, place: TurnPosition) -> bool:
        """Record that the answer to a turn exceeded its time limit. The episode ends with that turn."""
        awaited = self.next
        if not isinstance(awaited, AnswerTurn) or awaited.place != place:
            return False
        self.trajectory.end = EpisodeEnd.time
        return True

    def _add(self, segment: Segment) -> None:
        self.trajectory.segments.append(segment)
        self._num_tokens += len(segment)
