"""Keys by which messages of a conversation are recognized when an agent sends them again.

Clients send a message back in another form than they received it: without its ids, with null fields, with
content as a list of parts, or with arguments of a call that they have parsed and written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def message_key(message: Mapping[str, Any]) -> str:
    """Return the key of a message as chat templates read it.

    Two messages have the same key if they have the same role, text, and calls (names and arguments). Ids of
    calls, reasoning, and all other fields do not count.
    """
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in _calls(message)]
    # The order of arguments does not matter.
    return json.dumps([message["role"], message.get("content") or "", calls], sort_keys=True)


def tools_key(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the key of the tools that a model is shown. Their order counts, because templates render it."""
    return json.dumps(tools or [], sort_keys=True)


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()
