"""Handling of lone surrogates, which cannot be encoded.

They are halves of a character that JSON escapes such as "\\ud83d" can produce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.machine.wording import in_short, named

PROBLEM = "half of a character (a lone surrogate), which no tokenizer or file can encode"


def lone_surrogate(value: Any) -> str | None:
    """Return the location of the first lone surrogate in a nested value, or None.

    The value consists of mappings, lists and strings.

    The location is a path such as "[1].tool_calls[0].function.arguments.item", and "" for a plain string.
    """
    left: list[tuple[str, Any]] = [("", value)]
    while left:
        place, each = left.pop()
        if isinstance(each, str):
            if not is_encodable(each):
                return place
        elif isinstance(each, Mapping):
            if (
                unwritable := next(
                    (key for key in each if isinstance(key, str) and not is_encodable(key)), None
                )
            ) is not None:
                return f"the key {in_short(unwritable)}" + (f" of {place}" if place else "")
            # Push in reverse, so that the first location in reading order is found first.
            left += [
                (f"{place}.{named(str(key))}" if place else named(str(key)), inner)
                for key, inner in reversed(list(each.items()))
            ]
        elif isinstance(each, list | tuple):
            left += [(f"{place}[{index}]", inner) for index, inner in reversed(list(enumerate(each)))]

    return None


def is_encodable(text: str) -> bool:
    """Return whether `text` can be encoded as UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False

    return True


def replace_surrogates(value: Any) -> Any:
    """Return `value` with U+FFFD instead of each lone surrogate in its strings and keys.

    Two adjacent halves become their character.
    """
    if isinstance(value, str):
        return (
            value
            if is_encodable(value)
            else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )

    if isinstance(value, Mapping):
        return {replace_surrogates(key): replace_surrogates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [replace_surrogates(each) for each in value]
    return value
