"""Values of nested sections by their dotted keys, such as `actor.parallel` or `teachers[0].path`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    if isinstance(section, dict):
        return section | {first: _with(section.get(first), rest, value)}
    return replace(section, **{first: _with(getattr(section, first), rest, value)})


def upwards(key: str) -> Iterator[str]:
    """Yield a key, and the sections that it is in, the innermost first."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def given_at(values: Any, key: str) -> Any:
    """Return the value of a key in nested mappings; None if it is not given. An empty key is all of them."""
    for name in key.split(".") if key else ():
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted keys as nested sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *outer, last = key.split(".")
        section = tree
        for name in outer:
            section = section.setdefault(name, {})
        section[last] = value
    return tree


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested sections with their dotted keys. An empty section is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def merged(old: Any, new: Any) -> Any:
    """Return a mapping with the names of both, and otherwise the new value."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}


def replaced(value: Any, change: Callable[[str, Any], Any], key: str = "") -> Any:
    """Return a value in which `change` has replaced each item of its mappings and lists.

    Args:
        change: Called with the dotted key of an item, and the item.
        key: The key of the value.
    """
    if isinstance(value, Mapping):
        return {name: replaced(item, change, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [replaced(item, change, f"{key}[{index}]") for index, item in enumerate(value)]
    return change(key, value)
