"""Compares plain values with the schema, and refuses violations.

An error names the nearest known key or the valid values.
"""

from __future__ import annotations

import difflib
import logging
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.migration import MigrationProblem, framework_of, leaf_names, of_other_kinds, synonym_hint
from megarl.config.schema import MISSING, SCHEMAS
from megarl.config.schema.keys import InputKind, OutputFolder
from megarl.config.sources import PATH, Layer

_log = logging.getLogger(__name__)

_OF_STRINGS = (str, list[str], dict[str, str])
# Types of keys, and those of other values that they take.
_CONVERTED = {(int, str), (float, str), (float, int), (str, int), (str, float)}
_SIGNS = ("+", "~")  # Hydra's signs to add and to remove a key
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")  # a shell's variable without braces
_HOME = re.compile(r"^~(?=/|$)")
# Values that have been renamed. The old name is accepted, with a warning.
_RENAMED_VALUES = {"rollout.on_update": {"go_on": "continue"}}
# Values that users of other frameworks may expect, and why they are refused.
_REFUSED_VALUES = {
    "kind": {
        name: f"that is an algorithm; use kind=ppo and algorithm={name}"
        for name in ("grpo", "rloo", "remax", "dapo", "gspo", "cispo")
    },
    "rollout.engine": {
        "vllm": "vLLM does not exist here; use sglang, or hf for tests and tiny models",
    },
    "rollout.dtype": {
        name: f"{title} is not supported, only FP8 with a float32 scale for each block of 128 x 128; use fp8"
        for name, title in {"mxfp8": "MXFP8", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "int8": "INT8"}.items()
    },
}


class _Unknown(NamedTuple):
    """An unknown key, which is explained when all of them are known.

    Attributes:
        place: The number of problems before it.
        hint: What to say if no framework and no other kind of run has the key.
    """

    place: int
    key: str
    value: Any
    hint: str
    layer: Layer


@dataclass
class Review:
    """Compares plain values with the schema, and collects refused keys and problems."""

    schema: type
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # full dotted keys
    unknown: list[_Unknown] = field(default_factory=list)

    def read(self, layer: Layer) -> dict[str, Any]:
        """Return the values of a layer in the types of their keys, without schema violations.

        The search for problems can continue with them. Interpolations are not resolved.
        """
        # The choices and overrides that could not be read.
        for key, problem in layer.refused:
            self._refuse(key, problem, layer)

        return self._fitting(self.schema, layer.values, "", layer)

    def _fitting(self, section: type, values: Mapping[Any, Any], prefix: str, layer: Layer) -> dict[str, Any]:
        hints = key_types(section)
        good: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        inputs = {
            entry.name: entry.metadata[InputKind] for entry in fields(section) if InputKind in entry.metadata
        }

        # Refuse unknown keys, descend into sections, and collect the plain values.
        for name, value in values.items():
            key = f"{prefix}{name}"
            if name not in hints:
                hint = _nearest(self.schema, section, prefix, str(name))
                self.unknown.append(_Unknown(len(self.problems), key, value, hint, layer))
            elif is_dataclass(hints[name]):
                # A text instead of a section with a path is this path, as in `model: Qwen/Qwen3-0.6B`.
                if isinstance(value, str) and value != MISSING and PATH in key_types(hints[name]):
                    value = {PATH: value}
                if isinstance(value, Mapping):
                    good[name] = self._fitting(typing.cast(type, hints[name]), value, f"{key}.", layer)
                else:
                    self._refuse(
                        key,
                        f"{key}: is {value!r}, but must be a section with the keys "
                        f"{', '.join(key_types(hints[name]))}",
                        layer,
                    )
            elif (
                (item := item_section(hints[name]))
                and isinstance(value, list)
                and all(isinstance(row, Mapping) for row in value)
            ):
                good[name] = [
                    self._fitting(item, row, f"{key}[{index}].", layer) for index, row in enumerate(value)
                ]
            else:
                if _without_null(hints[name]) in _OF_STRINGS:
                    value = layer.as_written(key, value)
                plain[name] = _with_current_name(key, value, layer.source)
                # A single file instead of a list of files is the only one.
                is_input = inputs.get(name) is InputKind.data
                is_single = isinstance(value, str) and "${" not in value and value != MISSING
                if is_input and is_single and hints[name] == list[str]:
                    plain[name] = [value]

        # A missing value may come from a later layer, so it is judged when all are merged.
        # OmegaConf would take the marker for no value at all.
        for name in [*plain]:
            if any(text == MISSING for _, text in texts_of(plain[name], name)):
                good[name] = plain.pop(name)

        # Paths are resolved here, because only the layer knows which file named them.
        outputs = {entry.name for entry in fields(section) if OutputFolder in entry.metadata}

        for name, value in plain.items():
            key = f"{prefix}{name}"
            if (name in inputs or name in outputs) and (unexpanded := _unexpanded(value)) is not None:
                self._refuse(key, f"{key}: {unexpanded}", layer)
                continue
            try:
                fits = converted(hints[name], value)
            except (OmegaConfBaseException, OverflowError, ValueError):
                reason = _REFUSED_VALUES.get(key, {}).get(str(value), f"must be {expected(hints[name])}")
                self._refuse(key, f"{key}: is {value!r}, but {reason}", layer)
                continue

            if name in inputs:
                fits = each_text(fits, partial(layer.place_of, inputs[name]))
            elif name in outputs:
                fits = each_text(fits, layer.output_of)
            good[name] = fits

        return good

    def explain_unknown(self) -> None:
        """Refuse the unknown keys.

        A key of another framework gets a migration hint, and megarl's key is then not reported as missing.
        """
        if not self.unknown:
            return
        known = set(schema_keys(self.schema))
        framework = framework_of({each.key: each.value for each in self.unknown})
        others = {kind.value: set(schema_keys(schema)) for kind, schema in SCHEMAS.items()}
        own = next((kind.value for kind, schema in SCHEMAS.items() if schema is self.schema), None)
        before = self.problems
        self.problems = []

        for number, (place, key, value, hint, layer) in enumerate(self.unknown):
            earlier = self.unknown[number - 1].place if number else 0
            self.problems += before[earlier:place]
            found = [] if framework is None else framework.explain(key, value, known)

            # The key is known and only has one of Hydra's signs.
            if not found and key.startswith(_SIGNS):
                found = [
                    MigrationProblem(text, name) for name, text in _without_sign(key, value) if name in known
                ]
            if not found and own is not None:
                found = [
                    MigrationProblem(f"{leaf}: belongs to kind: {kinds}; this file has kind: {own}", leaf)
                    for leaf, kinds in of_other_kinds(key, value, others)
                ]
            # A branch that is no typing error is explained leaf by leaf, if its leaves have other names here.
            leaves = {leaf: synonym_hint(leaf, known) for leaf in leaf_names(key, value)}
            is_typing_error = hint.startswith("did you mean")
            if not found and not is_typing_error and key not in leaves and any(leaves.values()):
                found = [
                    MigrationProblem(f"{leaf}: unknown key; {meant or hint}")
                    for leaf, meant in leaves.items()
                ]
            for each in found or [MigrationProblem(f"{key}: unknown key; {hint}")]:
                self._refuse(each.ours or key, each.message, layer)

        self.problems += before[self.unknown[-1].place :]
        self.unknown = []

    def _refuse(self, key: str | None, problem: str, layer: Layer) -> None:
        if key is not None:
            self.refused.add(key)
        self.problems.append(f"{problem} [{layer.source}]")


def texts_of(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield each string in a value, with its dotted key, but no members of enumerations."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts_of(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from texts_of(inner, f"{key}[{index}]")
    elif isinstance(value, str) and not isinstance(value, Enum):
        yield key, value


def _unexpanded(paths: Any) -> str | None:
    """Explain a path, or the first in a list, with a variable or `~` that only a shell would expand."""
    for path in paths if isinstance(paths, list) else [paths]:
        if not isinstance(path, str):
            continue
        written = _VARIABLE.sub(r"${oc.env:\1}", _HOME.sub("${oc.env:HOME}", path))
        if path.startswith("~") or written != path:
            remedy = "write the whole path" if written.startswith("~") else f"write {written!r}"
            return f"is {path!r}, but neither ~ nor $NAME is expanded; {remedy}"
    return None


def _with_current_name(key: str, value: Any, source: str) -> Any:
    """Return the value, or its new name where it has been renamed."""
    new = _RENAMED_VALUES.get(key, {}).get(value) if isinstance(value, str) else None
    if new is None:
        return value
    _warn_of_old_value(key, value, new, source)

    return new


@cache
def _warn_of_old_value(key: str, old: str, new: str, source: str) -> None:
    """Warn once of a value that has been renamed, however often its file is read."""
    _log.warning("%s: %s is now called %s; write %s=%s [%s]", key, old, new, key, new, source)


def _without_sign(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys of an override with one of Hydra's signs, and the message about each."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from _without_sign(f"{key}.{name}", below)
    else:
        name = key.lstrip("".join(_SIGNS))
        yield (
            name,
            f"{key}: write {name}=..., without a sign before it: every key exists already, and null unsets "
            f"an optional one",
        )


@cache
def key_types(section: Any) -> Mapping[str, Any]:
    """Return the type of each key of a section."""
    hints = typing.get_type_hints(section)
    return {entry.name: hints[entry.name] for entry in fields(section)}


def item_section(hint: Any) -> type | None:
    """Return the dataclass of a list of sections; None for other types."""
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
    return item if isinstance(item, type) and is_dataclass(item) else None


def converted(hint: Any, value: Any) -> Any:
    """Return a value in the type of its key: '1e-5' is a float, and 'grpo' a member of an enumeration.

    A text with a reference is returned as it is, unless the key is true or false.

    Raises:
        ValueError: The value does not fit. 3.5 is no integer, 5 is not true, and true is no number or string.
        OmegaConfBaseException: A reference in a text is not closed.
    """
    single = _without_null(hint)
    kind = typing.get_origin(single) or single
    given = type(value)
    if value is None and (single is not hint or kind is Any):
        return None
    if isinstance(value, str) and "${" in value and kind is not bool:
        OmegaConf.create([value])
        return value

    # Lists, maps, and sections in a list with references, which are checked when these are resolved.
    if isinstance(value, list | tuple) and kind in (list, Any):
        item = Any if kind is Any else typing.get_args(single)[0]
        return [converted(item, each) for each in value]
    if isinstance(value, Mapping) and (kind in (dict, Any) or is_dataclass(kind)):
        if kind is dict and not all(isinstance(name, str) for name in value):
            raise ValueError("not all names are strings")
        item = typing.get_args(single)[1] if kind is dict else Any
        return {name: converted(item, each) for name, each in value.items()}

    if kind is Any and isinstance(value, bool | int | float | str | bytes | Path):
        return value
    if isinstance(value, str) and isinstance(kind, type) and issubclass(kind, Enum):
        name = value.removeprefix(f"{kind.__name__}.")
        return kind[name] if name in kind.__members__ else kind(name)
    if given is kind or (kind is str and isinstance(value, str)):
        return value
    if (kind, given) in _CONVERTED or (kind is str and isinstance(value, Path)):
        return kind(value)
    raise ValueError(f"{value!r} does not fit {hint}")


def _without_null(hint: Any) -> Any:
    """Return `str` for `str | None`, and any other type as it is."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    return parts[0] if type(None) in typing.get_args(hint) and len(parts) == 1 else hint


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Apply `change` to a string, or to each string of a list."""
    if isinstance(value, list):
        return [each_text(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def expected(hint: Any) -> str:
    """Return the words for a type in messages and on the reference page."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    if hint in words:
        return words[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.value for member in hint)

    if typing.get_origin(hint) is list:
        if section := item_section(hint):
            return f"a list of objects with the keys {', '.join(key_types(section))}"
        return f"a list, each item {expected(typing.get_args(hint)[0])}"

    if typing.get_origin(hint) is dict:
        return f"a map {{name: value}}, each value {expected(typing.get_args(hint)[1])}"
    if hint is typing.Any:
        return "anything"
    # The only remaining type is a union, for a value that may be null.
    assert typing.get_origin(hint) in (typing.Union, types.UnionType), hint

    return " or ".join("null" if part is type(None) else expected(part) for part in typing.get_args(hint))


def schema_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a section, including those of nested sections themselves."""
    for name, hint in key_types(section).items():
        yield prefix + name
        if is_dataclass(hint):
            yield from schema_keys(hint, f"{prefix}{name}.")


# Likeness of a typing error: names that differ more have other meanings. Only names are compared, without the
# sections around them, and a name of another section must be nearly the same.
_LIKENESS = 0.75
_SAME_WORD = 0.85


def _nearest(schema: type, section: type, prefix: str, name: str) -> str:
    """Suggest a key, or all keys of the section.

    The order is: a typing error of a key of the section, the key that the name means, the same name inside
    the section, the same name in one other section, a typing error of any key.
    """
    keys = list(schema_keys(schema))
    if near := difflib.get_close_matches(name, key_types(section), n=1, cutoff=_SAME_WORD):
        return f"did you mean {prefix}{near[0]}?"
    if (meant := synonym_hint(prefix + name, set(keys))) is not None:
        return meant
    inside = [key for key in schema_keys(section, prefix) if key.rsplit(".", 1)[-1] == name]
    if len(inside) == 1:
        return f"did you mean {inside[0]}?"
    if near := difflib.get_close_matches(name, key_types(section), n=1, cutoff=_LIKENESS):
        return f"did you mean {prefix}{near[0]}?"

    # Several sections may have the name, or one like it: prefer the one whose whole path is most similar.
    names = {key.rpartition(".")[2] for key in keys}
    meant = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=_SAME_WORD)
    if same := [key for key in keys if key.rpartition(".")[2] in meant]:
        nearest = max(same, key=lambda key: difflib.SequenceMatcher(None, key, prefix + name).ratio())
        return f"did you mean {nearest}?"
    return f"known here: {', '.join(key_types(section))}"
