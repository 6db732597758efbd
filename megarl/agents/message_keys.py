"""Keys by which messages of a conversation are recognized when an agent sends them again.

Clients send a message back in another form than they received it: without its ids, with null fields, with
content as a list of parts, or with arguments of a call that they have parsed and written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any


def message_key(message: Mapping[str, Any]) -> str:
    """Return the key of a message as chat templates read it.

    Two messages have the same key if they have the same role, text, and calls (names and arguments, with
    equal numbers). Ids of calls, reasoning, and all other fields do not count.
    """
    calls = [
        (call["function"]["name"], _arguments_key(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    # The order of arguments does not matter.
    return json.dumps([message["role"], message.get("content") or "", calls], sort_keys=True)


def tools_key(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the key of the tools that a model is shown. Their order counts, because templates render it."""
    return json.dumps(tools or [], sort_keys=True)


def _arguments_key(arguments: Any) -> Any:
    """Return arguments as they are compared. Some clients send no arguments as null or ""."""
    return {} if arguments is None or arguments == "" else _with_equal_numbers(arguments)


def _with_equal_numbers(value: Any) -> Any:
    """Return a JSON value with one form of each number: JavaScript writes 1.0 as 1 and 1e3 as 1000."""
    if isinstance(value, float) and value.is_integer():
        # The digits count: int(1e23) is 99999999999999991611392.
        return int(Decimal(repr(value)))
    if isinstance(value, Mapping):
        return {key: _with_equal_numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_equal_numbers(each) for each in value]
    return value
