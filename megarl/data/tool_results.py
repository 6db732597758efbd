"""Pairs the results of tools with the calls that they answer.

APIs and data sets bind a result to its call by an id, in any order. Most chat templates write no ids, so a
model takes the first result for that of the first call. Results are therefore brought into the order of the
calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from megarl.data.tool_columns import names_of

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
