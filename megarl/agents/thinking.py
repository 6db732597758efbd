"""Tool calls inside thinking.

Text between `<think>` and `</think>` is a draft and not a call, unless the run sets
`agent.calls_in_thinking`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megarl.agents.protocol import CallError, ToolCall
from megarl.config.schema import CallsInThinking
from megarl.models.thinking import END_THINK, THINK, split_thinking_off

CallParser = Callable[[str], Sequence[ToolCall | CallError]]


class CallTags(NamedTuple):
    """The tags around calls of one format.

    Thinking tags between them are part of the call. Without `end`, a call extends to the end of the turn.
    """

    begin: str
    end: str = ""


# The text of a part of a turn, without the thinking tags around it, and whether it is thinking.
TurnPart = tuple[str, bool]


def parse_outside_thinking(
    parse: CallParser, tags: CallTags | None, calls_in_thinking: CallsInThinking, *, opens_thinking: bool
) -> CallParser:
    """Return a parser that separates calls in thinking from other calls.

    With `ignore`, nothing in thinking is a call. With `execute`, well-formed calls in thinking count. A tag
    that is only mentioned in thinking is not reported as a malformed call in either case.

    Args:
        parse: Parses the calls of a text without thinking.
        tags: The tags of the calls that `parse` reads. None if they are unknown.
        opens_thinking: Whether the chat template opens the thinking of each turn, so that the model writes
            only its end.
    """

    def read(text: str) -> list[ToolCall | CallError]:
        parts = split_thinking(text, tags, opens_thinking=opens_thinking)
        if calls_in_thinking is CallsInThinking.ignore:
            return list(parse("".join(part for part, is_thinking in parts if not is_thinking)))
        # Parse each part by itself: in thinking, only well-formed calls count.
        found = [(is_thinking, each) for part, is_thinking in parts for each in parse(part)]
        return [each for is_thinking, each in found if not (is_thinking and isinstance(each, CallError))]

    return read


def split_thinking(text: str, tags: CallTags | None, *, opens_thinking: bool = False) -> list[TurnPart]:
    """Split a turn into thinking and the rest, in order.

    Thinking at the beginning of the turn is that of `split_thinking_off`. Between calls, a model may think
    again. Such thinking needs both tags: a `<think>` without an end tag is treated as ordinary text.
    """
    thinking, rest = split_thinking_off(text, opens_thinking=opens_thinking)
    parts = [(thinking, True)]
    start = len(text) - len(rest)
    is_thinking = False

    while start < len(text):
        end = _find(text, END_THINK, start) if is_thinking else _next_thinking(text, tags, start)
        parts.append((text[start:end], is_thinking))
        start = end + len(END_THINK if is_thinking else THINK)
        is_thinking = not is_thinking

    return [part for part in parts if part[0]]


def _next_thinking(text: str, tags: CallTags | None, start: int) -> int:
    """Return where the next thinking outside a call begins, or the length of the text."""
    while True:
        thinking = _find(text, THINK, start)
        call = len(text) if tags is None else _find(text, tags.begin, start)
        # A thinking tag inside a call is part of the call, so it counts only before the next call.
        if thinking < call:
            return thinking if END_THINK in text[thinking:] else len(text)
        if tags is None or call == len(text):
            return len(text)
        # Continue the search after the call.
        start = _find(text, tags.end, call + len(tags.begin)) if tags.end else len(text)


def _find(text: str, searched: str, start: int) -> int:
    """Return the index of `searched` from `start` on, or the length of the text."""
    found = text.find(searched, start)
    return len(text) if found < 0 else found
