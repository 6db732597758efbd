"""Tool calls and thinking: what a model drafts between `<think>` and `</think>` is not a call, unless a run
asks for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megarl.agents.protocol import CallError, ToolCall
from megarl.config.schema import CallsInThinking

THINK = "<think>"
END_THINK = "</think>"
CallParser = Callable[[str], Sequence[ToolCall | CallError]]


class CallTags(NamedTuple):
    """The texts around calls of one form. Thinking tags between them are a part of the call. Without `end` a
    call ends with the turn."""

    begin: str
    end: str = ""


class TurnPart(NamedTuple):
    """A stretch of a turn, without the thinking tags around it."""

    text: str
    is_thinking: bool


def parse_outside_thinking(
    parse: CallParser, tags: CallTags | None, calls_in_thinking: CallsInThinking, *, opens_thinking: bool
) -> CallParser:
    """Returns a parser that tells calls in thinking from other calls.

    With `ignore` nothing in thinking is a call. With `execute` those that can be read are calls; a tag that
    is only mentioned in thinking is no unreadable call in either case.

    Args:
        parse: Reads the calls of a text that has no thinking in it.
        tags: Of the calls that `parse` reads; None if they are not known.
        opens_thinking: Whether the chat template opens the thinking of each turn, so that the model writes
            only its end.
    """

    def read(text: str) -> list[ToolCall | CallError]:
        parts = split_thinking(text, tags, opens_thinking=opens_thinking)
        if calls_in_thinking is CallsInThinking.ignore:
            return list(parse("".join(part.text for part in parts if not part.is_thinking)))
        # Parse each part by itself: in thinking, only calls that can be read count.
        found = [(part.is_thinking, each) for part in parts for each in parse(part.text)]
        return [each for is_thinking, each in found if not (is_thinking and isinstance(each, CallError))]

    return read


def split_thinking(text: str, tags: CallTags | None, *, opens_thinking: bool = False) -> list[TurnPart]:
    """Splits a turn into thinking and the rest, in order.

    A thinking part that begins the turn lasts to its end tag, or to the end of the turn if there is none. A
    later one needs both of its
    tags: a `<think>` without an end is only mentioned.
    """
    parts: list[TurnPart] = []
    start = 0
    is_thinking = opens_thinking

    # The turn opens its thinking itself, whether or not the template has done so.
    if text.lstrip().startswith(THINK):
        is_thinking = True
        start = text.index(THINK) + len(THINK)

    while start < len(text):
        if is_thinking:
            end = _find(text, END_THINK, start)
            parts.append(TurnPart(text[start:end], is_thinking=True))
            start = end + len(END_THINK)
        else:
            end = _next_thinking(text, tags, start)
            parts.append(TurnPart(text[start:end], is_thinking=False))
            start = end + len(THINK)
        is_thinking = not is_thinking

    return [part for part in parts if part.text]


def _next_thinking(text: str, tags: CallTags | None, start: int) -> int:
    """Returns where the next thinking part outside a call begins, or the length of the text."""
    while True:
        thinking = _find(text, THINK, start)
        call = len(text) if tags is None else _find(text, tags.begin, start)
        # A thinking tag inside a call is part of the call, so it counts only before the next call.
        if thinking < call:
            return thinking if END_THINK in text[thinking:] else len(text)
        if tags is None or call == len(text):
            return len(text)
        # Skip the call and search behind it.
        start = _find(text, tags.end, call + len(tags.begin)) if tags.end else len(text)


def _find(text: str, searched: str, start: int) -> int:
    """Returns the index of `searched` from `start` on, or the length of the text."""
    found = text.find(searched, start)
    return len(text) if found < 0 else found
