"""Strict parser of calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Qwen and Hermes models write calls in this form. A malformed call is reported to the model instead of being
treated as an answer.
"""

from __future__ import annotations

import re

from megarl.agents.protocol import CallError, CallErrorKind, ToolCall
from megarl.machine.strict_json import load_strictly

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_TAGS = re.compile(f"({OPEN}|{CLOSE})")


def parse_calls(text: str) -> list[ToolCall | CallError]:
    """Parse the calls of `text` in their order. A text without tags has no calls, and so is an answer."""
    calls: list[ToolCall | CallError] = []
    inside: str | None = None  # text of the call that is open

    for piece in _TAGS.split(text):
        if piece == OPEN:
            if inside is not None:
                calls.append(unreadable(f"{OPEN} follows {OPEN}, without {CLOSE} between them"))
            inside = ""
        elif piece == CLOSE:
            calls.append(unreadable(f"{CLOSE} without {OPEN} before it") if inside is None else _read(inside))
            inside = None
        elif inside is not None:
            inside += piece

    if inside is not None:
        calls.append(unreadable(f"{CLOSE} is missing"))
    return calls


def _read(text: str) -> ToolCall | CallError:
    try:
        call = load_strictly(text)
    except (ValueError, RecursionError) as error:
        return unreadable(f"it is not JSON ({error or type(error).__name__})")

    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return unreadable('expected {"name": ..., "arguments": {...}}')
    if unknown := sorted(call.keys() - {"name", "arguments"}):
        return unreadable(f'{unknown[0]!r} is not allowed next to "name" and "arguments"')
    return ToolCall(call["name"], call.get("arguments", {}))


def unreadable(reason: str) -> CallError:
    """Return the error of a call that cannot be parsed, for the model to read."""
    return CallError(CallErrorKind.unreadable, f"the call could not be read: {reason}")
