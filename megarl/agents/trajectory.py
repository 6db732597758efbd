"""What has been written in an episode, as token ids with their authors: the mask of the loss is the
author."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from megarl.agents.protocol import CallErrorKind


class Author(str, Enum):
    model = "model"
    environment = "environment"


class EpisodeEnd(str, Enum):
    """Why an episode is over."""

    done = "done"  # the environment says so; with tools: a turn without a call
    length = "length"  # a turn was cut, or there is no room for another
    turns = "turns"  # it has as many turns as it may have
    time = "time"  # the answer to a turn took too long


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens of one author, side by side. token_ids: (N,) int32. log_probs: (N,) float32, of the engine, 0
    where the environment wrote.
    token_versions: (N,) int32, of the weights that drew each token, -1 where the environment wrote."""

    author: Author
    token_ids: np.ndarray
    log_probs: np.ndarray
    token_versions: np.ndarray

    @classmethod
    def of_environment(cls, token_ids: Sequence[int]) -> Segment:
        ids = np.array(token_ids, dtype=np.int32)
        return cls(
            author=Author.environment,
            token_ids=ids,
            log_probs=np.zeros(len(ids), dtype=np.float32),
            token_versions=np.full(len(ids), -1, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(kw_only=True)
class Trajectory:
    """An episode as it stands: a turn of the model, what the environment said to it, the next turn. The last
    segment is the model's.

    turn_rewards: of the environment, one for each turn of the model. tool_s: seconds spent in tools.
    """

    prompt: Sequence[int]
    segments: list[Segment] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    end: EpisodeEnd | None = None
    num_calls: int = 0
    call_errors: Counter[CallErrorKind] = field(default_factory=Counter)
    tool_s: float = 0.0

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards)

    @property
    def token_ids(self) -> np.ndarray:
        """(R,) int32: all that came after the prompt."""
        return self._joined([segment.token_ids for segment in self.segments], np.int32)

    @property
    def log_probs(self) -> np.ndarray:
        """(R,) float32."""
        return self._joined([segment.log_probs for segment in self.segments], np.float32)

    @property
    def token_versions(self) -> np.ndarray:
        """(R,) int32."""
        return self._joined([segment.token_versions for segment in self.segments], np.int32)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """That wrote turns of the model, in rising order."""
        # Tokens of the environment have version -1.
        drawn = self.token_versions
        return tuple(np.unique(drawn[drawn >= 0]).tolist())

    @property
    def mask(self) -> np.ndarray:
        """(R,) bool: the model wrote it."""
        return self._joined(
            [np.full(len(segment), segment.author is Author.model) for segment in self.segments], bool
        )

    @property
    def rewards(self) -> np.ndarray:
        """(R,) float32: of each turn, on its last token."""
        rows = [np.zeros(len(segment), dtype=np.float32) for segment in self.segments]
        turns = [
            row for row, segment in zip(rows, self.segments, strict=True) if segment.author is Author.model
        ]
        for row, reward in zip(turns, self.turn_rewards, strict=True):
            row[-1] = reward

        return self._joined(rows, np.float32)

    @property
    def turn_ends(self) -> np.ndarray:
        """(R,) bool: the last token of a turn of the model."""
        rows = [np.zeros(len(segment), dtype=bool) for segment in self.segments]
        for row, segment in zip(rows, self.segments, strict=True):
            row[-1] = segment.author is Author.model
        return self._joined(rows, bool)

    @staticmethod
    def _joined(rows: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(rows) if rows else np.zeros(0, dtype=dtype)
