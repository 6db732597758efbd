"""Resolves the references of a configuration (`${...}`), and finds values that are missing (`???`).

Both are OmegaConf's, and may be in any value of any layer. A reference names another key, as in
`data.seed: ${trainer.seed}`, or an environment variable, as in `${oc.env:HOME}/runs`. `???` in a file stands
for a value that an inheriting file or an override has to give.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.review import expected, item_section, key_types, texts_of
from megarl.config.schema import MISSING
from megarl.config.sources import HOW_TO_REFER, in_one_line


class _Place(NamedTuple):
    """A value of a key in the merged values.

    Attributes:
        owner: The schema of the section or list item with the key.
        path: The names and indices that lead to the value.
    """

    owner: type
    section: dict[str, Any]
    name: str
    key: str
    path: tuple[str | int, ...]


def _places(
    schema: type, values: dict[str, Any], prefix: str = "", path: tuple[str | int, ...] = ()
) -> Iterator[_Place]:
    """Yield the values of all keys, also of those in lists of sections."""
    hints = key_types(schema)
    for name, value in list(values.items()):
        hint = hints[name]
        key = f"{prefix}{name}"
        item = item_section(hint)
        if is_dataclass(hint):
            yield from _places(typing.cast(type, hint), value, f"{key}.", (*path, name))
        elif item and isinstance(value, list) and all(isinstance(row, dict) for row in value):
            for index, row in enumerate(value):
                yield from _places(item, row, f"{key}[{index}].", (*path, name, index))
        else:
            yield _Place(schema, values, name, key, (*path, name))


def resolve(
    schema: type, values: dict[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, str | None]]:
    """Replace each value with references by the value that they stand for.

    Yields the keys of these values. A value that cannot be resolved is removed, and yielded with its problem.

    Args:
        schema: The schema of the run.
        values: The merged values of all layers, which are changed.
        defaults: The defaults of all keys, to which references may refer too.
    """
    with_references = [
        place
        for place in _places(schema, values)
        if any("${" in text for _, text in texts_of(place.section[place.name], place.key))
    ]
    if not with_references:
        return
    merged: Any = OmegaConf.unsafe_merge(OmegaConf.create(dict(defaults)), values)

    for place in with_references:
        written = place.section[place.name]
        try:
            value = merged
            for step in place.path:
                value = value[step]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, ValueError) as error:
            key = str(getattr(error, "full_key", None) or place.key)
            text = dict(texts_of(written, place.key)).get(key, written)
            del place.section[place.name]
            yield place.key, f"{key}: {_reason(error)} in {text!r}; {HOW_TO_REFER}"
        else:
            place.section[place.name] = value
            needed = expected(key_types(place.owner)[place.name])
            # A text with an escaped reference would be taken for a reference by the check of types.
            is_literal = any("${" in text for _, text in texts_of(value, place.key))
            if is_literal and not _may_be_texts(needed, value):
                del place.section[place.name]
                yield place.key, f"{place.key}: is {value!r}, but must be {needed}"
            else:
                yield place.key, None


def _may_be_texts(needed: str, value: Any) -> bool:
    """Whether a key of the type `needed`, in words, can have a value of strings with escaped references."""
    if "anything" in needed or "a string" not in needed:
        return "anything" in needed
    if needed.startswith("a list"):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, Mapping) if needed.startswith("a map") else isinstance(value, str)


def _reason(error: Exception) -> str:
    """Return why a reference cannot be resolved, without OmegaConf's name of a Python exception."""
    text = in_one_line(error)
    return text.partition("raised while resolving interpolation: ")[2].strip('"') or text


def drop_missing(schema: type, values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Remove each value that is or contains `???`, and yield its key and its problem.

    A required key without a value yields nothing, because it is reported like one that is not set at all.
    """
    for place in list(_places(schema, values)):
        value = place.section[place.name]
        marked = [key for key, text in texts_of(value, place.key) if text == MISSING]
        if not marked:
            continue
        del place.section[place.name]
        default = next(entry.default for entry in fields(place.owner) if entry.name == place.name)
        if value != MISSING or default != MISSING:
            needed = expected(key_types(place.owner)[place.name])
            yield (
                place.key,
                f"{marked[0]}: is {MISSING!r}, which stands for a value that is still missing; {place.key} "
                f"must be {needed}, or be left out",
            )


def escaped(value: Any) -> Any:
    """Return a resolved value such that OmegaConf reads it back, although it contains `${`."""
    if isinstance(value, dict):
        return {name: escaped(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [escaped(inner) for inner in value]
    # Backslashes before the signs would escape them, or each other.
    return re.sub(r"(\\*)\$\{", r"\1\1\${", value) if isinstance(value, str) else value
