"""Values of a configuration by their dotted keys, such as `actor.parallel` or `teachers[0].path`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any


def value_at(config: Any, key: str) -> Any:
    """Return the value of a key."""
    for part in _parts(key):
        config = config[part] if isinstance(part, int) else getattr(config, part)
    return config


def values_at(config: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key, in which `[]` stands for every item of a list."""
    before, is_list, after = key.partition("[].")
    value = value_at(config, before)
    if not is_list:
        yield value
        return
    for item in value:
        yield from values_at(item, after)


def with_value[Config](config: Config, key: str, value: Any) -> Config:
    """Return the configuration with another value of a key."""
    return _with(config, _parts(key), value)


def _parts(key: str) -> list[str | int]:
    """Return the names of sections, and the indices in lists."""
    parts = key.replace("[", ".").replace("]", "").split(".")
    return [int(part) if part.isdigit() else part for part in parts]


def _with(section: Any, parts: Sequence[str | int], value: Any) -> Any:
    if not parts:
        return value
    first, *rest = parts
    if isinstance(first, int):
        return [_with(item, rest, value) if index == first else item for index, item in enumerate(section)]
    return replace(section, **{first: _with(getattr(section, first), rest, value)})
