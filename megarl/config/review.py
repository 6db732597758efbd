"""Reads values into the types of their keys, and builds the configuration from them.

Everything that is wrong is collected on the way: unknown keys with the nearest known one, values that do not
fit with the valid ones, references (`${...}`) to nothing, missing values (`???`), and required keys.

A reference names another key, as in `data.seed: ${trainer.seed}`, or an environment variable, as in
`${oc.env:HOME}/runs`. `???` in a file stands for a value that an inheriting file or an override has to give.
Both are OmegaConf's, and may be in any value of any layer.
"""

from __future__ import annotations

import difflib
import logging
import typing
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.dotted import given_at, merged
from megarl.config.migration import (
    Problems,
    framework_of,
    leaf_names,
    synonym_hint,
    with_current_keys,
)
from megarl.config.schema import MISSING, SCHEMAS
from megarl.config.schema.keys import PathKind, default_of, prose
from megarl.config.sources import HOW_TO_REFER, PATH, Layer, in_one_line
from megarl.config.values import (
    contents_of,
    converted,
    each_text,
    expected,
    in_order,
    item_section,
    key_types,
    schema_keys,
    texts_of,
    unexpanded,
    unusable_texts,
    without_null,
)

_log = logging.getLogger(__name__)

_OF_STRINGS = (str, list[str], dict[str, str])
_SIGNS = ("+", "~")  # Hydra's signs to add and to remove a key
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
        hint: What to say if no framework and no other kind of run has the key.
    """

    key: str
    value: Any
    hint: str
    layer: Layer


_Refusal = tuple[str | None, str]  # the refused key, None if it is unknown, and the message


class Review:
    """Reads the layers of a configuration, the lowest first, and builds the configuration from them.

        review = Review(PPOConfig, "run.yaml")
        for layer in layers:
            review.read(layer)  # converts values, resolves paths, and merges what fits
        config, problems = review.build()  # resolves references, and uses defaults for refused values

    What is wrong is collected in the order of the values, so that one message can list all of it.
    """

    def __init__(self, schema: type, source: str) -> None:
        """Begin without values.

        Args:
            source: The name of the configuration in messages about values that references stand for.
        """
        self._schema = schema
        self._values: dict[str, Any] = {}  # the merged values of all layers, in the types of their keys
        self._found: list[_Refusal | _Unknown] = []
        self._required: list[str] = []
        self._resolved = Layer(f"{source}, with its references", {})

    def read(self, layer: Layer) -> None:
        """Merge the values of a layer that fit their keys. References are kept as they are."""
        # The choices and overrides that could not be read.
        for key, problem in layer.refused:
            self._refuse(key, problem, layer)

        # A preset replaces its whole section; keys of layers with lower precedence must not remain in it.
        for section in layer.replaces:
            outer, _, name = section.rpartition(".")
            (given_at(self._values, outer) or {}).pop(name, None)
        values, former = with_current_keys(layer.values, set(schema_keys(self._schema)), self._values)
        for key, problem, is_refused in former:
            if is_refused:
                self._refuse(key, f"{key}: {problem}", layer)
            else:
                _warn_once(f"{key}: {problem} [{layer.source}]")
        self._read_section(self._schema, values, self._values, "", layer)

    def build(self) -> tuple[Any, list[_Refusal]]:
        """Return the configuration, with a default or an empty value for each refused or missing one.

        Also returns the problems, each with its key.
        """
        config = self._built(default_of(self._schema), self._values, "", ())
        problems = [*self._problems()]
        refused = {key for key, _ in problems}
        problems += [
            (key, f"{key}: is required; set it in the file or as {key}=...")
            for key in sorted(self._required)
            if key not in refused
        ]
        return config, problems

    def _read_section(
        self, section: type, values: Mapping[Any, Any], into: dict[str, Any], prefix: str, layer: Layer
    ) -> None:
        hints = key_types(section)
        for name, value in values.items():
            key = f"{prefix}{name}"
            hint = hints.get(name)
            if hint is None:
                nearest = _nearest(self._schema, section, prefix, str(name))
                self._found.append(_Unknown(key, value, nearest, layer))
            elif is_dataclass(hint):
                # A text instead of a section with a path is this path, as in `model: Qwen/Qwen3-0.6B`.
                if isinstance(value, str) and value != MISSING and PATH in key_types(hint):
                    value = {PATH: value}
                if isinstance(value, Mapping):
                    inner = into.setdefault(name, {})
                    self._read_section(typing.cast(type, hint), value, inner, f"{key}.", layer)
                else:
                    keys = ", ".join(each.name for each in in_order(hint))
                    self._refuse(
                        key, f"{key}: is {value!r}, but must be a section with the keys {keys}", layer
                    )
            elif (item := item_section(hint)) and _is_table(value):
                into[name] = [{} for _ in value]
                for index, row in enumerate(value):
                    self._read_section(item, row, into[name][index], f"{key}[{index}].", layer)
            else:
                self._read_value(section, name, value, into, key, layer)

    def _read_value(
        self, section: type, name: str, value: Any, into: dict[str, Any], key: str, layer: Layer
    ) -> None:
        hint = key_types(section)[name]
        kind = _metadata(section)[name].get(PathKind)
        if without_null(hint) in _OF_STRINGS:
            value = layer.as_written(key, value)
        # A single file instead of a list of files is the only one.
        is_single = isinstance(value, str) and "${" not in value and value != MISSING
        if kind is PathKind.data and is_single and hint == list[str]:
            value = [value]

        # A missing value may come from a later layer, so it is judged when all are merged.
        # OmegaConf would take the marker for no value at all.
        if _missing(value, key):
            into[name] = merged(into.get(name), deepcopy(value))
            return
        if kind is not None and (problem := unexpanded(value)) is not None:
            self._refuse(key, f"{key}: {problem}", layer)
            return
        try:
            fits = converted(hint, value, refers=layer is not self._resolved)
        except (OmegaConfBaseException, OverflowError, ValueError):
            reason = _REFUSED_VALUES.get(key, {}).get(str(value), f"must be {expected(hint)}")
            self._refuse(key, f"{key}: is {value!r}, but {reason}", layer)
            return

        # Paths are resolved here, because only the layer knows which file named them.
        if kind is not None:
            fits = each_text(fits, partial(layer.place_of, kind))
        into[name] = merged(into.get(name), fits)

    def _built(
        self, default: Any, values: Mapping[str, Any], prefix: str, path: tuple[str | int, ...] | None
    ) -> Any:
        """Return a section with the merged values.

        Args:
            default: The section with its defaults.
            path: The names and indices that lead to the values; None if they have no references any more.
        """
        hints = key_types(type(default))
        given: dict[str, Any] = {}

        for name, metadata in _metadata(type(default)).items():
            key = f"{prefix}{name}"
            usual = getattr(default, name)
            here = None if path is None else (*path, name)
            item = item_section(hints[name])
            if is_dataclass(hints[name]):
                given[name] = self._built(usual, values.get(name, {}), f"{key}.", here)
                continue

            own = {name: values[name]} if name in values else {}
            # The keys of a list of sections are looked at one by one.
            is_table = item is not None and bool(own) and _is_table(own[name])
            if here is not None and own and not is_table and _refers(own[name], key):
                own = self._resolve(type(default), name, own[name], prefix, here)
                here = None
                is_table = item is not None and bool(own) and _is_table(own[name])
            if own and not is_table and (marked := _missing(own[name], key)):
                # A required key is reported like one that is not set at all.
                if not own[name] == usual == MISSING:
                    self._refuse(
                        key,
                        f"{marked}: is {MISSING!r}, which stands for a value that is still missing; {key} "
                        f"must be {expected(hints[name])}, or be left out",
                    )
                own = {}

            if not own and usual == MISSING:
                self._required.append(key)
                # A value of the right type, so that the rest of the section is still checked.
                given[name] = [] if typing.get_origin(hints[name]) is list else ""
            elif is_table:
                given[name] = [
                    self._built(default_of(item), row, f"{key}[{index}].", here and (*here, index))
                    for index, row in enumerate(own[name])
                ]
            elif own:
                try:
                    # A map in which an entry was missing at first has not been compared with its type.
                    given[name] = converted(hints[name], own[name], refers=False)
                except (OverflowError, ValueError):
                    self._refuse(key, f"{key}: is {own[name]!r}, but must be {expected(hints[name])}")
                    given[name] = deepcopy(usual)
                for problem in unusable_texts(given[name], is_prose=prose in metadata):
                    self._refuse(key, f"{key}: {problem}")
            else:
                given[name] = deepcopy(usual)

        return replace(default, **given)

    def _resolve(
        self, section: type, name: str, written: Any, prefix: str, path: Sequence[str | int]
    ) -> dict[str, Any]:
        """Return the value that references stand for, by its name; nothing if there is none that fits."""
        try:
            value = self._references
            for step in path:
                value = value[step]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except (OmegaConfBaseException, ValueError) as error:
            key = f"{prefix}{name}"
            place = str(getattr(error, "full_key", None) or key)
            text = dict(texts_of(written, key)).get(place, written)
            # Without OmegaConf's name of a Python exception.
            whole = in_one_line(error)
            reason = whole.partition("raised while resolving interpolation: ")[2].strip('"') or whole
            self._refuse(key, f"{place}: {reason} in {text!r}; {HOW_TO_REFER}")
            return {}

        read: dict[str, Any] = {}
        self._read_section(section, {name: value}, read, prefix, self._resolved)
        return read

    @property
    def has_unknown_keys(self) -> bool:
        return any(isinstance(each, _Unknown) for each in self._found)

    @cached_property
    def _references(self) -> Any:
        """All values that references may name, in OmegaConf's form: the defaults and the merged values."""
        return OmegaConf.create(merged(contents_of(default_of(self._schema)), self._values))

    def _problems(self) -> Iterator[_Refusal]:
        """Yield the problems, and explain the unknown keys.

        A key of another framework gets a migration hint, and megarl's key is then not reported as missing.
        """
        unknown = [each for each in self._found if isinstance(each, _Unknown)]
        framework = framework_of({each.key: each.value for each in unknown}) if unknown else None
        known = set(schema_keys(self._schema)) if unknown else set()

        for each in self._found:
            if not isinstance(each, _Unknown):
                yield each
                continue
            found = [] if framework is None else framework.explain(each.key, each.value, known)
            for message, ours in found or _explained(self._schema, each, known):
                yield ours or each.key, f"{message} [{each.layer.source}]"

    def _refuse(self, key: str | None, problem: str, layer: Layer | None = None) -> None:
        self._found.append((key, problem if layer is None else f"{problem} [{layer.source}]"))


def _explained(schema: type, unknown: _Unknown, known: set[str]) -> Problems:
    """Return the problems of a key that no other framework has."""
    key, value, hint, _ = unknown
    # The key is known and only has one of Hydra's signs.
    if key.startswith(_SIGNS):
        signed: Problems = [
            (
                f"{leaf}: write {name}=..., without a sign before it: every key exists already, and null "
                "unsets an optional one",
                name,
            )
            for leaf in leaf_names(key, value)
            if (name := leaf.lstrip("".join(_SIGNS))) in known
        ]
        if signed:
            return signed
    own = next((kind.value for kind, each in SCHEMAS.items() if each is schema), None)
    elsewhere: Problems = [
        (f"{leaf}: belongs to kind: {kinds}; this file has kind: {own}", leaf)
        for leaf in leaf_names(key, value)
        if own is not None and (kinds := _kinds_with(leaf))
    ]
    if elsewhere:
        return elsewhere

    # A branch that is no typing error is explained leaf by leaf, if its leaves have other names here.
    leaves = {leaf: synonym_hint(leaf, known) for leaf in leaf_names(key, value)}
    if not hint.startswith("did you mean") and key not in leaves and any(leaves.values()):
        return [(f"{leaf}: unknown key; {meant or hint}", None) for leaf, meant in leaves.items()]
    return [(f"{key}: unknown key; {hint}", None)]


def _kinds_with(key: str) -> str:
    """Return the names of the kinds of run that have a key; an empty string if there are none."""
    return " and ".join(kind.value for kind, schema in SCHEMAS.items() if key in schema_keys(schema))


@cache
def _metadata(section: Any) -> dict[str, Mapping[Any, Any]]:
    """Return the metadata of each key of a section."""
    return {entry.name: entry.metadata for entry in fields(section)}


def _is_table(value: Any) -> bool:
    """Whether a value is a list of sections."""
    return isinstance(value, list) and all(isinstance(row, Mapping) for row in value)


def _refers(value: Any, key: str) -> bool:
    return any("${" in text for _, text in texts_of(value, key))


def _missing(value: Any, key: str) -> str | None:
    """Return the key of the first `???` in a value."""
    return next((marked for marked, text in texts_of(value, key) if text == MISSING), None)


@cache
def _warn_once(message: str) -> None:
    """Warn of a key of an earlier version, however often its file is read."""
    _log.warning("%s", message)


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
    return f"known here: {', '.join(each.name for each in in_order(section))}"
