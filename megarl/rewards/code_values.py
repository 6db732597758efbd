"""Encodes Python values as JSON to transfer them out of the sandbox, and compares them.

`encode` runs in the process of the evaluated program, which controls its output. `decode` builds only values
of built-in types, so comparing them runs no code of the program. This module uses only the standard library,
because its source also runs inside the sandbox.
"""

from __future__ import annotations

import collections
import collections.abc
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

MOST_PARTS = 300_000  # of a value, counting everything that it contains
LONGEST_ITERATOR = 100_000  # items encoded of an iterator, which may be endless
# Keys of a dict or set with the same hash. Building it takes time quadratic in their number.
_MOST_OF_ONE_HASH = 100
_LONGEST_FRACTION = 10_000  # digits
_EXACT_IN_JSON = 2**53
_LARGEST = sys.float_info.max
# Standard library types that are encoded by the arguments of their constructors. Type -> attributes of a
# value.
_CONSTRUCTED = {
    "fractions.Fraction": ("numerator", "denominator"),
    "datetime.date": ("year", "month", "day"),
    "datetime.time": ("hour", "minute", "second", "microsecond"),
    "datetime.datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    "datetime.timedelta": ("days", "seconds", "microseconds"),
    "builtins.range": ("start", "stop", "step"),
    "builtins.complex": ("real", "imag"),
}


class Opaque:
    """A value whose type cannot be encoded.

    It equals only itself, and its truth value is the one that the program reported.
    """

    def __init__(self, truth: bool, call: Callable[..., Any] | None = None) -> None:
        self._truth = truth
        self._call = call

    def __bool__(self) -> bool:
        return self._truth

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._call is None:
            raise TypeError("this value of the program cannot be called here")
        return self._call(*args, **named)


def encode(value: Any) -> Any:
    """Return JSON data for `value`: numbers, strings and None unchanged, all else as [type, content].

    Values of subclasses are encoded as their built-in type (a Counter as a dict, an IntEnum as an int), which
    is what `==` compares.

    Raises:
        ValueError: The value has more than MOST_PARTS parts.
    """
    return _encode(value, count(1))


def _encode(value: Any, parts: Iterator[int]) -> Any:
    if next(parts) > MOST_PARTS:
        raise ValueError(f"the value has more than {MOST_PARTS} parts")
    if value is None or value is True or value is False:
        return value

    # A subclass may override operators, so call the methods of the built-in types.
    if isinstance(value, int):
        plain = int.__pos__(value)
        return plain if -_EXACT_IN_JSON < plain < _EXACT_IN_JSON else ["int", hex(plain)]

    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, str):
        return str.__getitem__(value, slice(None))
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]

    return _encode_by_type(value, parts)


def _encode_by_type(value: Any, parts: Iterator[int]) -> Any:
    def each_of(items: Iterable[Any]) -> list[Any]:
        return [_encode(item, parts) for item in items]

    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if name in _CONSTRUCTED and getattr(value, "tzinfo", None) is None:
        return [name, each_of(getattr(value, attribute) for attribute in _CONSTRUCTED[name])]
    if name == "decimal.Decimal":
        return [name, [str(value)]]
    if isinstance(value, (tuple, list)):
        return ["tuple" if isinstance(value, tuple) else "list", each_of(value)]
    if isinstance(value, collections.abc.Mapping):
        return ["dict", [each_of((key, value[key])) for key in value]]
    if isinstance(value, collections.abc.Set):
        return ["set", each_of(value)]
    if name == "collections.deque":
        return ["deque", each_of(value)]
    # An iterator may be endless, so encode only its beginning.
    if isinstance(value, (collections.abc.Iterator, collections.abc.ValuesView)):
        return ["iterator", each_of(islice(iter(value), LONGEST_ITERATOR))]

    return ["opaque", [bool(value), callable(value)]]


def decode(data: Any, call: Callable[..., Any] | None = None) -> Any:
    """Rebuild an encoded value.

    Args:
        call: Called when an opaque value is called that the program can call.

    Raises:
        ValueError, TypeError, RecursionError: `data` is not valid; the program may have written it.
    """
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    kind, content = data
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "opaque":
        return Opaque(bool(content[0]), call if content[1] else None)

    if kind == "dict":
        keys = [decode(key, call) for key, _ in content]
        values = [decode(value, call) for _, value in content]
        return dict(zip(_hashable(keys), values, strict=True))

    items = [decode(each, call) for each in content]
    if kind in _COLLECTED:
        return _COLLECTED[kind](items)
    # Construct known types only, because the program may have sent any type name.
    if kind not in _CONSTRUCTED and kind != "decimal.Decimal":
        raise ValueError(f"{kind!r} is not a known type of value")
    if kind == "fractions.Fraction" and max(abs(each) for each in items) >= 10**_LONGEST_FRACTION:
        raise ValueError("the fraction is too long")
    module, name = kind.split(".")

    return getattr(importlib.import_module(module), name)(*items)


# Kinds of values -> what builds one from its items.
_COLLECTED: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": iter,
    "set": lambda items: frozenset(_hashable(items)),
    "deque": collections.deque,
}


def _hashable(keys: list[Any]) -> list[Any]:
    if (
        len(keys) > _MOST_OF_ONE_HASH
        and max(collections.Counter(map(hash, keys)).values()) > _MOST_OF_ONE_HASH
    ):
        raise ValueError(f"more than {_MOST_OF_ONE_HASH} keys have the same hash")
    return keys


def same_as_json(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Return whether `value` equals `expected`, which may have been decoded from JSON.

    The comparison is Python's `==`, except that tuples equal lists, NaN equals NaN, keys equal their JSON
    text ("1" equals 1), and a number may differ from an expected float by `tolerance`, absolute or relative
    to it.
    """
    return any(_is_same(value, expected, as_key, tolerance) for as_key in (_same_key, _json_key))


def _is_same(value: Any, expected: Any, as_key: Callable[[Any], Any], tolerance: float) -> bool:
    match expected:
        case float() if isinstance(value, (float, int)) and not isinstance(value, bool):
            return _is_near(value, expected, tolerance)
        case tuple() | list():
            if not isinstance(value, (tuple, list)) or len(value) != len(expected):
                return False
            # A loop, because a generator would halve the depth that can be compared.
            for each, wanted in zip(value, expected, strict=True):
                if not _is_same(each, wanted, as_key, tolerance):
                    return False
            return True
        case dict():
            if not isinstance(value, dict):
                return False
            found = {as_key(key): each for key, each in value.items()}
            keyed = {as_key(key): each for key, each in expected.items()}
            if found.keys() != keyed.keys():
                return False
            return _is_same([found[key] for key in keyed], [keyed[key] for key in keyed], as_key, tolerance)
    return bool(value == expected)


def _is_near(value: float, expected: float, tolerance: float) -> bool:
    # Equal infinities have no finite difference, and a long integer is no float.
    if value == expected or (math.isnan(expected) and value != value):
        return True
    if not math.isfinite(expected) or not -_LARGEST < value < _LARGEST:
        return False
    return abs(value - expected) <= tolerance * max(1.0, abs(expected))


def _same_key(key: Any) -> Any:
    return key


def _json_key(key: Any) -> Any:
    return json.dumps(key) if key is None or isinstance(key, (bool, int, float)) else key


def holds_nan(value: Any) -> bool:
    """Return whether `value` contains NaN anywhere, so that it does not equal itself."""
    return any(isinstance(each, float) and math.isnan(each) for each in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (leaf for pair in value.items() for leaf in _leaves(pair))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from (leaf for each in value for leaf in _leaves(each))
    else:
        yield value
