"""Defines samples of engines, and the tokens of an episode with their authors, which decide the loss mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from megarl.agents.protocol import CallErrorKind


class Author(str, Enum):
    model = "model"
    environment = "environment"


class EpisodeEnd(str, Enum):
    """The reason why an episode is over."""

    done = "done"  # the environment ended it; with tools: a turn without a call
    length = "length"  # a turn was truncated, or another one does not fit
    turns = "turns"  # the maximum number of turns is reached
    time = "time"  # the answer to a turn took too long
    failed = "failed"  # the program of a harness failed


class VersionSpan(NamedTuple):
    """Span of tokens sampled by the weights of `version`.

    It extends from the end of the previous span, or the start of the sample, up to `end`.
    """

    version: int
    end: int


class Sample(NamedTuple):
    """One continuation of a prompt.

    Attributes:
        token_ids: Shape (N,) int32, the tokens that the model wrote, including the end token if there is one.
        log_probs: Shape (N,) float32. THE contract of every engine (docs/rollout.md): log_softmax(logits /
            temperature) of the token over the whole vocabulary, before top-k and top-p; with temperature 0,
            log_softmax(logits).
        finish_reason: "stop" if the last token ended the sample, "length" if max_new_tokens did.
        spans: Which weights sampled which tokens, in order; the last span ends at N. There are several if
            weights were synced in the middle.
        routed_experts: A row of ROUTED_EXPERTS for prompt and sample, if requested.
        num_verifications: Forward passes in which the model verified drafted tokens; 0 without speculative
            decoding.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: Literal["stop", "length"]
    spans: tuple[VersionSpan, ...]
    routed_experts: np.ndarray | None = None
    num_verifications: int = 0

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Versions of the weights that wrote it, in order."""
        return tuple(span.version for span in self.spans)

    @property
    def token_versions(self) -> np.ndarray:
        """Version of the weights that sampled each token, (N,) int32."""
        lengths = np.diff([span.end for span in self.spans], prepend=0)
        return np.repeat(np.array(self.weight_versions, dtype=np.int32), lengths)

    def beginning(self, count: int) -> Sample:
        """Return the sample that an engine would have returned if it had stopped after `count` tokens."""
        starts = [0, *(span.end for span in self.spans)]
        return self._replace(
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            finish_reason="stop",
            spans=tuple(
                VersionSpan(span.version, min(span.end, count))
                for start, span in zip(starts, self.spans, strict=False)
                if start < count
            ),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens of one author.

    Attributes:
        token_ids: (N,) int32.
        log_probs: (N,) float32, reported by the inference engine; 0 for tokens of the environment.
        token_versions: (N,) int32, the version of the weights that sampled each token; -1 for tokens of the
            environment.
    """

    author: Author
    token_ids: np.ndarray
    log_probs: np.ndarray
    token_versions: np.ndarray

    @classmethod
    def of_model(cls, sample: Sample) -> Segment:
        return cls(
            author=Author.model,
            token_ids=sample.token_ids,
            log_probs=sample.log_probs,
            token_versions=sample.token_versions,
        )

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
    """The state of an episode: model turns and environment replies, alternating.

    In a finished episode, the last segment is the model's.

    An agent program may leave several conversations, each a row of the batch. `branches` has all of them, in
    the order of their last turns; segments and rewards of the episode itself are then those of the branches,
    one after the other.

    Attributes:
        turn_rewards: The environment's reward for each turn of the model.
        tool_s: Seconds spent in tools.
        branches: The conversations of an agent program, each with its own prompt. Empty: the episode is the
            only one, and its prompt is that of the data.
        failure: The kind of the failure of an agent program, whose episode has no turn, or None.
        metrics: Further numbers about the episode, by name.
    """

    prompt: Sequence[int]
    segments: list[Segment] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    end: EpisodeEnd | None = None
    num_calls: int = 0
    call_errors: Counter[CallErrorKind] = field(default_factory=Counter)
    tool_s: float = 0.0
    branches: Sequence[Trajectory] = ()
    failure: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def rows(self) -> Sequence[Trajectory]:
        """The rows of the batch that the episode becomes."""
        return self.branches or (self,)

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards)

    @property
    def token_ids(self) -> np.ndarray:
        """All tokens after the prompt, (R,) int32."""
        return self._joined([segment.token_ids for segment in self.segments], np.int32)

    @property
    def log_probs(self) -> np.ndarray:
        """The log probabilities of `token_ids`, (R,) float32."""
        return self._joined([segment.log_probs for segment in self.segments], np.float32)

    @property
    def token_versions(self) -> np.ndarray:
        """The weight versions of `token_ids`, (R,) int32."""
        return self._joined([segment.token_versions for segment in self.segments], np.int32)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """The versions of the weights that sampled the model's turns, ascending."""
        # Tokens of the environment have version -1.
        drawn = self.token_versions
        return tuple(np.unique(drawn[drawn >= 0]).tolist())

    @property
    def mask(self) -> np.ndarray:
        """Whether the model sampled each token, (R,) bool."""
        return self._joined(
            [np.full(len(segment), segment.author is Author.model) for segment in self.segments], bool
        )

    @property
    def rewards(self) -> np.ndarray:
        """The reward of each turn on its last token, 0 elsewhere, (R,) float32."""
        rows = [np.zeros(len(segment), dtype=np.float32) for segment in self.segments]
        turns = [
            row for row, segment in zip(rows, self.segments, strict=True) if segment.author is Author.model
        ]
        for row, reward in zip(turns, self.turn_rewards, strict=True):
            row[-1] = reward

        return self._joined(rows, np.float32)

    @staticmethod
    def _joined(rows: list[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate(rows) if rows else np.zeros(0, dtype=dtype)


def session_trajectory(
    prompt: Sequence[int],
    branches: Sequence[Trajectory],
    end: EpisodeEnd,
    num_calls: int,
    metrics: Mapping[str, float],
) -> Trajectory:
    """Build the episode of an agent program from its conversations."""
    return Trajectory(
        prompt=prompt,
        segments=[segment for branch in branches for segment in branch.segments],
        turn_rewards=[one for branch in branches for one in branch.turn_rewards],
        end=end,
        num_calls=num_calls,
        metrics=metrics,
        branches=branches,
    )


def failed_trajectory(prompt: Sequence[int], failure: str) -> Trajectory:
    """Build the episode of an agent program that failed. Its row has one token, without a loss."""
    return Trajectory(
        prompt=prompt,
        segments=[Segment.of_environment(prompt[-1:])],
        end=EpisodeEnd.failed,
        failure=failure,
    )
