"""A request for a turn of the model and its answer, independent of the API that a client speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megarl.agents.protocol import Message, Schema


@dataclass(frozen=True, kw_only=True)
class TurnQuery:
    """A request.

    Attributes:
        messages: The conversation, as chat templates read it: content is text, and arguments of calls are
            JSON values.
        tools: The tools that the model may call; None without tools.
        num_choices: Number of samples.
        max_tokens: Tokens per sample, in addition to the limits of the run.
        stop: Texts that end a sample, and are not part of its text.
    """

    messages: Sequence[Message]
    tools: Sequence[Schema] | None = None
    num_choices: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class SampledChoice(NamedTuple):
    """A sample as a client reads it.

    Attributes:
        text: What the model wrote outside of thinking and calls.
        reasoning: What it wrote between `<think>` and `</think>`; empty if there is none.
        num_reasoning: Tokens of this thinking and its tags.
        calls: The calls that could be read, as chat templates read them. Others are part of the text.
        finish_reason: "length" if a limit of tokens ended it.
        stop: The text of `TurnQuery.stop` that ended it, if one did.
        tokens: The UTF-8 bytes of each token, which may be a part of a character.
        log_probs: The log-prob of each token.
    """

    text: str
    reasoning: str
    num_reasoning: int
    calls: Sequence[Mapping[str, Any]]
    finish_reason: Literal["stop", "length"]
    stop: str | None
    tokens: Sequence[bytes]
    log_probs: Sequence[float]


class TurnReply(NamedTuple):
    """The answer to a request.

    Attributes:
        id: Names the answer among those of the process. APIs write it with a prefix.
        num_prompt_tokens: Tokens before the samples.
        num_reused: How many of them are recorded tokens of earlier turns.
    """

    id: str
    choices: Sequence[SampledChoice]
    num_prompt_tokens: int
    num_reused: int
