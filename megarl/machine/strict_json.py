"""JSON as its standard has it: Python's parser also takes NaN, keeps the last of two equal keys, and makes
texts that cannot be encoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from megarl.machine import unicode_text


def load_strictly(text: str) -> Any:
    """Parses JSON without NaN or Infinity, without a repeated key in an object, and without half of a
    character in a text.

    Raises:
        ValueError: The text is not such JSON.
        RecursionError: It is nested too deep.
    """
    value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=refuse_repeated_keys)
    # An escape such as \ud800 parses, but no UTF-8 file can hold the result.
    if (place := unicode_text.lone_surrogate(value)) is not None:
        raise ValueError(f"{place or 'it'} holds {unicode_text.PROBLEM}")
    return value


def dump_readable(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Returns JSON with characters as they are rather than as escapes, except for lone surrogates, which only
    an escape can spell.

    `default` turns what JSON does not know into something that it does, as in `json.dumps`.
    """
    text = json.dumps(value, ensure_ascii=False, default=default)
    return text if unicode_text.is_encodable(text) else text.encode(errors="backslashreplace").decode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An `object_pairs_hook` of `json.loads`. Raises ValueError for an object in which a key is there
    twice."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands in it twice")
        found[key] = value

    return found
