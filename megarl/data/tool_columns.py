"""Tools in the columns of data sets, in the form of chat templates.

They are the schemas shown to the model, and the calls in its messages.

The form is OpenAI's: {"type": "function", "function": {"name", "description", "parameters"}}, and in
assistant messages "tool_calls": [{"type": "function", "function": {"name", "arguments"}}], with arguments as
an object or as its JSON text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megarl.machine.strict_json import load_strictly

_TOOL = "{'type': 'function', 'function': {'name': 'price', 'parameters': {...}}}"
_CALL = "{'type': 'function', 'function': {'name': 'price', 'arguments': {'item': 'ab'}}}"


def schemas_of(value: Any) -> list[dict[str, Any]] | None:
    """Parse a value of the tools column, a list or JSON text.

    Returns None for no tools (in CSV an empty text). Raises ValueError.
    """
    tools = None if value == "" else _parsed(value)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"found {_short(tools)}, expected a list of tools such as {_TOOL}, or its JSON text")

    for tool in tools:
        if not _has_name(tool):
            raise ValueError(f"found the tool {_short(tool)}, expected one such as {_TOOL}")
        if _holds_nan(tool):
            raise ValueError(
                f"the tool {tool['function']['name']!r} contains NaN or an infinity, which JSON does not "
                "have; remove it"
            )

    return tools


def looks_like_tools(value: Any) -> bool:
    """Return whether a value of any column is a list of tools, or its JSON text.

    The tools are in OpenAI's form or bare functions.
    """
    try:
        tools = _parsed(value)
    except ValueError:
        return False

    if not isinstance(tools, list) or not tools:
        return False
    return all(
        _has_name(tool) or (isinstance(tool, Mapping) and {"name", "parameters"} <= tool.keys())
        for tool in tools
    )


def calls_of(value: Any) -> list[dict[str, Any]]:
    """Parse a message's `tool_calls`, with the arguments as objects. Raises ValueError."""
    calls = _parsed(value)
    if not isinstance(calls, list) or not calls:
        raise ValueError(f"tool_calls is {_short(calls)}, expected a list of calls such as {_CALL}")
    return [_call(call) for call in calls]


def names_of(tools_or_calls: Sequence[Mapping[str, Any]] | None) -> list[str]:
    return [each["function"]["name"] for each in tools_or_calls or []]


def _call(call: Any) -> dict[str, Any]:
    if not _has_name(call):
        raise ValueError(f"tool_calls contains {_short(call)}, expected a call such as {_CALL}")
    arguments = _parsed(call["function"].get("arguments", {}))

    if not isinstance(arguments, dict):
        raise ValueError(
            f"a call of {call['function']['name']!r} has the arguments {_short(arguments)}, expected an "
            f"object, or its JSON text"
        )

    if _holds_nan(arguments):
        raise ValueError(
            f"a call of {call['function']['name']!r} has the arguments {_short(arguments)}, with NaN or an "
            "infinity, which JSON does not have; write a number or a text"
        )

    # Parquet fills absent fields with null, which a template could treat as values.
    known = {key: each for key, each in call.items() if each is not None}
    return known | {"function": call["function"] | {"arguments": arguments}}


def _has_name(value: Any) -> bool:
    function = value.get("function") if isinstance(value, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return load_strictly(value)
    except (ValueError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"found the text {_short(value)}, which is not JSON ({reason})") from error


def holds_null(value: Any) -> bool:
    """Return whether `value` contains a null.

    Column formats fill a field with null if only other rows have it, and the model would be shown that null.
    """
    return any(each is None for each in leaves(value))


def _holds_nan(value: Any) -> bool:
    """Return whether `value` contains a number that JSON does not have: NaN or an infinity."""
    return any(isinstance(each, float) and not math.isfinite(each) for each in leaves(value))


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is neither a mapping nor a list in a nested value."""
    if isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(each)
    else:
        yield value


def _short(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else text[:77] + "..."
