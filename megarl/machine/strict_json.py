"""Standard-conforming JSON.

Python's parser also accepts NaN, keeps the last of two equal keys, and creates strings that cannot be
encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megarl.machine import unicode_text
from megarl.machine.wording import in_short

# Levels of lists and objects. Python's own limit is some hundreds, depending on what walks the value.
MAX_DEPTH = 200
_NESTED = (dict, list, tuple)


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
    if (place := unicode_text.lone_surrogate(value)) is not None:
        raise ValueError(f"{place or 'it'} has {unicode_text.PROBLEM}")
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
    return text if unicode_text.is_encodable(text) else text.encode(errors="backslashreplace").decode()


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
