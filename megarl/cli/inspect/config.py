"""Commands that show a configuration and its keys.

`megarl config CONFIG` prints it with everything merged, or the schema of its files. `megarl explain KEY
[CONFIG]` describes a key, and shows where its value comes from.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from typing import Any

import yaml

from megarl.config.dotted import nested, values_at
from megarl.config.json_schema import explanation, json_schema, section_explanation
from megarl.config.load import plain_values, read_config
from megarl.config.migration import former_keys
from megarl.config.readers import needs_in_words
from megarl.config.schema import SCHEMAS, RunConfig
from megarl.config.schema.keys import MISSING, Range, default_of, when_to_change
from megarl.config.sources import PATH, Layer, read_layers
from megarl.config.values import contents_of, expected, item_section, key_types, without_null
from megarl.machine.errors import ConfigError, written

_INDEX = re.compile(r"\[\d*\]$")
_Path = list[tuple[type, Field[Any]]]  # the sections on the way to a key, each with its field


def run(config_path: str | None, overrides: Sequence[str], changed: bool = False) -> None:
    """Print the configuration as YAML, which `megarl train` reads back to the same run.

    Values that depend on the machine, such as `device: auto`, stay as they are.

    Args:
        changed: Print only the keys that differ from their defaults.

    Raises:
        ConfigError: The configuration has errors.
        ValueError: There is no configuration.
    """
    if config_path is None:
        raise ValueError("give the CONFIG to print, or --schema for the JSON Schema of configuration files")
    config = read_config(RunConfig, config_path, overrides).required()
    values = plain_values(config)
    if changed:
        values = _differing(values, contents_of(default_of(type(config))))
    # Without its kind, a file is read as a reinforcement learning run.
    values = {"kind": config.kind.value} | values
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000), end="")


def schema(kind: str) -> None:
    """Print the JSON Schema of one of `json_schema.KINDS`."""
    print(json.dumps(json_schema(kind), indent=2))


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults, without the sections that have none of them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if value == default:
            continue
        is_section = isinstance(value, dict) and isinstance(default, dict) and bool(default)
        found[name] = _differing(value, default) if is_section else value
    return found


# ---- megarl explain


def explain(key: str, config_path: str | None, overrides: Sequence[str]) -> None:
    """Print the description of a key or a section, and its value in a run if one is given.

    Raises:
        ConfigError: No kind of run has the key, or the configuration has errors.
    """
    key = key.removesuffix("[]")
    config = None if config_path is None else read_config(RunConfig, config_path, overrides).required()
    schemas = list(SCHEMAS.values()) if config is None else [type(config)]
    paths = {schema: path for schema in schemas if (path := _path_to(schema, key))}
    if not paths:
        raise _unknown(schemas[0], key)
    schema, path = next(iter(paths.items()))

    print(key)
    if len(paths) < len(schemas):
        kinds = [kind.value for kind, each in SCHEMAS.items() if each in paths]
        print(f"    only in runs of kind: {', '.join(kinds)}")
    for line in _lines(key, path, _default(schema, path)):
        print(f"    {line}")
    if config is not None and not is_dataclass(_type_of(path)):
        try:
            values = [written(value) for value in values_at(config, key)]
        except IndexError:
            raise ConfigError(str(config_path), [f"{key}: the list has fewer items"]) from None
        print(f"    value: {', '.join(values)}")
        for line in _sources(read_layers(str(config_path), overrides), key):
            print(f"    {line}")


def _path_to(schema: type, key: str) -> _Path:
    """Return each section on the way to a key with its field; empty if there is no such key."""
    path: _Path = []
    section: Any = schema
    for part in key.split("."):
        name = _INDEX.sub("", part)
        if section is None or name not in key_types(section):
            return []
        path.append((section, next(entry for entry in fields(section) if entry.name == name)))
        hint = _type_of(path)
        section = hint if is_dataclass(hint) else item_section(hint)
    return path


def _type_of(path: _Path) -> Any:
    owner, entry = path[-1]
    return key_types(owner)[entry.name]


def _unknown(schema: type, key: str) -> ConfigError:
    """Return the error for an unknown key: how to replace a former one, or else the loader's hint."""
    section, _, name = re.sub(r"\[\d*\]", "[]", key).rpartition(".")
    outer, _, of_outer = section.removesuffix("[]").rpartition(".")
    # A section that has become one text had keys in it.
    former = former_keys().get((section, name)) or former_keys().get((outer, of_outer), {})
    if "ours" in former or "note" in former:
        now = f"it is now {section}.{former['ours']}" if "ours" in former else former["note"]
        return ConfigError("explain", [f"{key}: was a key of an earlier version; {now}"])
    problems = read_config(schema, nested({key: 0})).problems
    return ConfigError("explain", [line for line in problems if ": is required;" not in line])


def _lines(key: str, path: _Path, default: Any) -> Iterator[str]:
    """Yield the description of a key: its text, type, range, choices, default, and what it needs."""
    owner, entry = path[-1]
    hint = _type_of(path)
    if is_dataclass(hint):
        section = typing.cast(type, hint)
        yield section_explanation(section) or "a section"
        for inner in fields(hint):
            yield f"{key}.{inner.name}: {explanation(section, inner.name)}".rstrip(": ")
    else:
        yield explanation(owner, entry.name)
        allowed = entry.metadata.get(Range)
        yield f"type: {expected(hint)}" if allowed is None else f"type: {expected(hint)}, {allowed}"
        kind = without_null(hint)
        for choice in kind if isinstance(kind, type) and issubclass(kind, Enum) else ():
            yield f"  {choice.value}: {explanation(kind, choice.name)}"
        yield "required" if default == MISSING else f"default: {written(default)}"
    if when := when_to_change(entry):
        yield f"when to set it: {when}"

    for _, outer in path:
        yield from needs_in_words(outer)


def _default(schema: type, path: _Path) -> Any:
    value = default_of(schema)
    for owner, entry in path:
        # A list of sections has its defaults in each section.
        value = getattr(default_of(owner) if isinstance(value, list) else value, entry.name)
    return value


def _sources(layers: Sequence[Layer], key: str) -> Iterator[str]:
    """Yield where a value comes from, and what it replaces, the last one first."""
    found: list[tuple[str, Any]] = []
    for layer in layers:
        # A preset starts its section from the defaults.
        if any(key == section or key.startswith(f"{section}.") for section in layer.replaces):
            found.clear()
        for value in _in_layer(layer.values, key.split(".")):
            found.append((layer.source, value))
    if not found:
        yield "from: the default"
    for index, (source, value) in enumerate(reversed(found)):
        yield f"from: {source}" if index == 0 else f"replaces: {written(value)} of {source}"


def _in_layer(values: Any, parts: Sequence[str]) -> Iterator[Any]:
    """Yield the value of a key in a layer, if the layer has one."""
    first, *rest = parts
    name = _INDEX.sub("", first)
    # A text instead of a section is its path.
    if isinstance(values, str) and parts == [PATH]:
        yield values
    if not isinstance(values, Mapping) or name not in values:
        return
    inner = values[name]
    if not rest or isinstance(inner, list):
        yield inner
    else:
        yield from _in_layer(inner, rest)
