"""Standard-conforming JSON.

Python's parser also accepts NaN, keeps the last of two equal keys, and creates strings that cannot be
encoded: JSON escapes such as "\\ud83d" can produce lone surrogates, which are halves of a character.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from megarl.machine.errors import in_short, named

# Levels of lists and objects. Python's own limit is some hundreds, depending on what walks the value.
MAX_DEPTH = 200
_NESTED = (dict, list, tuple)
UNENCODABLE = "half of a character (a lone surrogate), which no tokenizer or file can encode"


def load_strictly(text: str | bytes) -> Any:
    """Parse JSON, refusing NaN and Infinity, repeated keys in an object, and lone surrogates in strings.

    Values of more than MAX_DEPTH levels are refused too.

    Raises:
        ValueError: The text is not such JSON.
    """
    too_deep = f"it is nested more than {MAX_DEPTH} levels deep"
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=refuse_repeated_keys)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if is_too_deep(value):
        raise ValueError(too_deep)
    # An escape such as \ud800 can be parsed, but no UTF-8 file can contain the result.
    if (place := lone_surrogate(value)) is not None:
        raise ValueError(f"{place or 'it'} has {UNENCODABLE}")
    return value


def is_too_deep(value: Any) -> bool:
    """Return whether a value of dictionaries, lists and tuples has more than MAX_DEPTH levels.

    A value that contains itself has.
    """
    level = [value] if isinstance(value, _NESTED) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        members = (each.values() if isinstance(each, dict) else each for each in level)
        nested = (each for inner in members for each in inner if isinstance(each, _NESTED))
        # A value that occurs several times in a level, by an alias of YAML, is looked into once.
        level = list({id(each): each for each in nested}.values())
    return bool(level)


def dump_readable(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON with characters unescaped, except for lone surrogates, which must be escaped.

    `default` converts values that JSON does not support, as in `json.dumps`.
    """
    text = json.dumps(value, ensure_ascii=False, default=default)
    return text if is_encodable(text) else text.encode(errors="backslashreplace").decode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An `object_pairs_hook` of `json.loads` that raises ValueError for an object with a repeated key."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {in_short(key)} occurs twice")
        found[key] = value

    return found


# ---- text that cannot be encoded


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
    return [replace_surrogates(each) for each in value] if isinstance(value, list | tuple) else value


def refuse_unencodable(value: Any, what: str) -> None:
    """Raise ValueError if a string anywhere in `value` cannot be encoded as UTF-8.

    Args:
        value: Plain data: strings, numbers, and lists, tuples, sets and dicts of them.
        what: The start of the error, such as "the ground truth".
    """
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{what} {value[:60]!r} has the lone surrogate {value[error.start]!r} at position "
                    f"{error.start}, which no response can contain; replace it in the data"
                ) from None
        case dict():
            for key, each in value.items():
                refuse_unencodable(key, what)
                refuse_unencodable(each, what)
        case list() | tuple() | set() | frozenset():
            for each in value:
                refuse_unencodable(each, what)
