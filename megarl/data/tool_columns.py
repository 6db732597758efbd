"""Tools in the columns of data sets, in the form of chat templates.

They are the schemas shown to the model, and the calls in its messages.

The form is OpenAI's: {"type": "function", "function": {"name", "description", "parameters"}}, and in
assistant messages "tool_calls": [{"type": "function", "function": {"name", "arguments"}}], with arguments as
an object or as its JSON text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
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


# ---- results of tools. APIs and data sets bind a result to its call by an id, in any order. Most chat
# templates write no ids, so a model takes the first result for that of the first call.


_Message = dict[str, Any]


def order_results(messages: Sequence[_Message], *, calls_in_text: bool = False) -> list[_Message]:
    """Return the messages of a chat with each run of tool results in the order of the calls before it.

    Results without ids are paired with the calls by their position.

    Args:
        calls_in_text: Whether an assistant's message without `tool_calls` may have calls in its text. Their
            results cannot be paired and stay as they are.

    Raises:
        ValueError: An id occurs twice or names no call; a call has no result although another result of its
            turn, or the assistant's next message, follows; or results without ids do not match the calls.
    """
    ordered: list[_Message] = []
    for are_results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        run = list(group)
        if are_results:
            before = ordered[-1] if ordered else {}
            is_text = calls_in_text and before.get("role") == "assistant" and not _calls(before)
            ordered += run if is_text else _paired(_calls(before), run, first=len(ordered))
            continue

        # A user may continue without waiting for a result, but the assistant may not.
        for index, (message, following) in enumerate(pairwise(run), len(ordered)):
            if following["role"] == "assistant" and (calls := _calls(message)):
                raise ValueError(_without_result(calls[0], index))
        ordered += run

    return ordered


def _paired(calls: Sequence[Mapping[str, Any]], results: list[_Message], first: int) -> list[_Message]:
    """Return the results of some calls in their order. The first result is message `first` of the chat."""
    ids = [_id(result, "tool_call_id", first + index) for index, result in enumerate(results)]
    if all(each is None for each in ids):
        return _by_position(calls, results, first)

    # Each call and each result needs an id of its own before any of them can be looked up.
    of_calls = [_id(call, "id", first - 1) for call in calls]
    for counts, what, place in ((Counter(of_calls), "calls", first - 1), (Counter(ids), "results", first)):
        if doubled := next((each for each, count in counts.items() if each is not None and count > 1), None):
            raise ValueError(f"message {place}: two {what} have the id {doubled!r}; each needs its own")

    known = {each: None for each in of_calls if each is not None}
    for index, each in enumerate(ids, first):
        if each not in known:
            found = "no id" if each is None else f"the id {each!r}, which names no call"
            raise ValueError(
                f"message {index}: the tool result has {found} of message {first - 1}; the ids of its calls: "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
    by_id = dict(zip(ids, results, strict=True))
    for call, each in zip(calls, of_calls, strict=True):
        if each not in by_id:
            raise ValueError(_without_result(call, first - 1))

    return [by_id[each] for each in of_calls]


def _by_position(calls: Sequence[Mapping[str, Any]], results: list[_Message], first: int) -> list[_Message]:
    """Return results without ids as they are, if they can be those of the calls."""
    if not calls:
        return results
    if len(calls) != len(results):
        raise ValueError(
            f"message {first - 1} has {len(calls)} calls, but {len(results)} results without a tool_call_id "
            "follow; give each call one result, or the ids"
        )

    for index, (name, result) in enumerate(zip(names_of(calls), results, strict=True), first):
        if result.get("name", name) != name:
            raise ValueError(
                f"message {index}: the tool result has the name {result['name']!r}, but its place is that of "
                f"the call of {name!r}; write results in the order of the calls, or give them a tool_call_id"
            )
    return results


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return (message.get("tool_calls") or ()) if message.get("role") == "assistant" else ()


def _id(value: Mapping[str, Any], key: str, index: int) -> str | int | None:
    """Return the id of a call or a result, or None. Some data sets write an empty text for no id."""
    found = value.get(key)
    if found is None or found == "":
        return None
    if not isinstance(found, str | int):
        raise ValueError(f"message {index}: {key} is {found!r:.80}, expected a text")
    return found


def _without_result(call: Mapping[str, Any], index: int) -> str:
    name = call["function"]["name"]
    which = f"{call['id']!r} (of {name!r})" if call.get("id") else f"of {name!r}"
    return (
        f"message {index}: the call {which} has no result; add it as a message with the role tool after the "
        "calls"
    )
