"""Finds keys that have no effect in a run, by what the schema declares that each key needs (`only_with`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import Any

from megarl.config.dotted import values_at
from megarl.config.finding import Finding
from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.config.schema.keys import OnlyWith, Reader, default_of, leaves, needs_of
from megarl.machine.errors import written
from megarl.models.architecture import Architecture

_PROPERTIES = {
    "experts": "has no experts",
    "vision": "has no vision tower",
    "indexer": "has no sparse attention",
}
# The parts of models that keys need.
_PARTS = {"experts": "experts", "vision": "a vision tower", "indexer": "sparse attention"}


def unread_keys(
    config: RunConfig, architectures: Mapping[str, Architecture], *, refused: bool
) -> Iterator[Finding]:
    """Yield a message about all keys that have been changed and have no effect in this run, by the reason.

    A key with its default is not reported, and neither is one that needs a property of a model that could not
    be read.

    Args:
        refused: Whether to yield the keys that are refused, or those that the user is warned of.
    """
    found: dict[tuple[str, OnlyWith, str], list[tuple[str, Any]]] = {}
    for leaf in leaves(config, default_of(type(config))):
        for prefix, needed in leaf.needs if leaf.value != leaf.usual else ():
            role = _role_of(config, leaf.key)
            if not any(
                _is_met(config, role, _whole(reader, prefix), architectures) for reader in needed.readers
            ):
                of_model = role if any(reader.architecture for reader in needed.readers) else ""
                found.setdefault((prefix, needed, of_model), []).append((leaf.key, leaf.value))
                break

    for (prefix, needed, role), keys in found.items():
        if needed.is_refused is refused and not needed.is_usual:
            yield _message(
                config,
                architectures,
                role,
                [_whole(reader, prefix) for reader in needed.readers],
                needed.why,
                keys,
            )


def needs_in_words(entry: Field[Any]) -> list[str]:
    """Return a line about each setting without which a key or a section has no effect."""
    return [f"only with {' or '.join(map(_in_words, needed.readers))}" for needed in needs_of(entry)]


def _in_words(reader: Reader) -> str:
    key = reader.key.removeprefix(".")
    if reader.architecture:
        return "a model with " + _PARTS[reader.architecture]
    if reader.values:
        return f"`{key}` {', '.join(f'`{written(value)}`' for value in reader.values)}"
    return f"`{key}` above {reader.above:g}" if reader.above else f"`{key}`"


def _whole(reader: Reader, prefix: str) -> Reader:
    """Return a reader with a whole key."""
    return reader._replace(key=prefix + reader.key[1:]) if reader.key.startswith(".") else reader


def _is_met(config: RunConfig, role: str, reader: Reader, architectures: Mapping[str, Architecture]) -> bool:
    if reader.architecture:
        model = architectures.get(role)
        return model is None or getattr(model, reader.architecture) is not None
    try:
        values = [*values_at(config, reader.key)]
    except AttributeError:  # a key of other kinds of run
        return False
    return any(
        each in reader.values
        if reader.values
        else each > reader.above
        if isinstance(each, int | float)
        else bool(each)
        for value in values
        for each in (value if reader.values and isinstance(value, list) else [value])
    )


def _role_of(config: RunConfig, key: str) -> str:
    """Return the role whose model a key is about: that of the section with the key, or the policy."""
    sections = {
        role.parallel_key.removesuffix("parallel"): role.name for role in reversed(model_roles(config))
    }
    return next((role for section, role in sections.items() if key.startswith(section)), "actor")


def _message(
    config: RunConfig,
    architectures: Mapping[str, Architecture],
    role: str,
    readers: list[Reader],
    why: str,
    keys: list[tuple[str, Any]],
) -> Finding:
    first, *others = readers
    names = tuple(key for key, _ in keys)
    because = f": {why}" if why else ""
    what = f"is {written(keys[0][1])}, but has" if len(keys) == 1 else "have"
    them = "it" if len(keys) == 1 else "them"

    if first.architecture:
        path = next(each.path for each in model_roles(config) if each.name == role)
        model = f"{path} ({architectures[role].model_type}) {_PROPERTIES[first.architecture]}"
        return Finding(names, f"{what} no effect: {model}; remove {them}")
    try:
        values = list(values_at(config, first.key))
    except AttributeError:
        return Finding(names, f"{what} no effect in a run of kind {config.kind.value}; remove {them}")

    # With many alternatives, their names say enough.
    if len(others) > 1:
        listed = ", ".join(reader.key for reader in readers)
        return Finding(names, f"{what} no effect without one of {listed}{because}; remove {them}, or set one")
    present = f"with {first.key}={written(values[0])}" if len(values) == 1 else f"without {first.key}"
    cures = " or ".join(_cure(reader) for reader in readers)
    return Finding((*names, first.key), f"{what} no effect {present}{because}; set {cures}, or remove {them}")


def _cure(reader: Reader) -> str:
    *most, last = [written(value) for value in reader.values] or [reader.example]
    return f"{reader.key}={', '.join(most)} or {last}" if most else f"{reader.key}={last}"
