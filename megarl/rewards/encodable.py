"""Detects text in a ground truth that no response can contain: lone surrogates, which UTF-8 cannot encode."""

from __future__ import annotations

from typing import Any


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
