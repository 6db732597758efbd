"""JSON Schemas (draft 2020-12) of the configuration files, for completion and checks in editors.

`megarl config --schema` prints them. They are generated from the typed schema: keys, types, ranges, choices,
defaults, and comments as descriptions. A schema covers one file. `megarl check` covers rules across keys and
files.
"""

from __future__ import annotations

import ast
import inspect
import math
import typing
from dataclasses import Field, is_dataclass
from enum import Enum
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from megarl.config.schema import SCHEMAS, AlgorithmConfig, PPOConfig, RunKind
from megarl.config.schema.keys import (
    LARGEST,
    MISSING,
    PathKind,
    Range,
    default_of,
    range_of,
    when_to_change,
)
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import BASE, COMBINED, GROUPS, WITH
from megarl.config.values import contents_of, in_order, key_types

DRAFT = "https://json-schema.org/draft/2020-12/schema"
ANY_RUN = "run"
PRESET = "algorithm"
KINDS = (ANY_RUN, *(kind.value for kind in RunKind), PRESET)

Schema = dict[str, Any]

_REFERENCE = r"^\$\{.+\}$"  # a reference to the value of another key
_ANY_NUMBER = Range()


def json_schema(kind: str) -> Schema:
    """Return the schema of a file of one of KINDS.

    A file is any run, one kind of run, or a preset of the section `algorithm`.
    """
    if kind == PRESET:
        return {"$schema": DRAFT, "title": "A preset of the section algorithm", **_preset()}
    # Other schemas need a matching `kind`, because a file without one is a PPO run.
    if kind == ANY_RUN:
        choice: Schema = _run(RunKind.ppo)
        for other in reversed([each for each in RunKind if each is not RunKind.ppo]):
            is_other = {"properties": {"kind": {"const": other.value}}, "required": ["kind"]}
            choice = {"if": is_other, "then": _run(other), "else": choice}
        return {"$schema": DRAFT, "title": "A run of megarl", "type": "object", **choice}

    return {"$schema": DRAFT, "title": f"A run of megarl, kind: {kind}", **_run(RunKind(kind))}


def _run(kind: RunKind) -> Schema:
    root = SCHEMAS[kind]
    section = _section(root, root())
    properties = section["properties"]
    # A schema of one kind accepts no other value of `kind`.
    properties["kind"] = {"const": kind.value, "description": properties["kind"]["description"]}

    # Sections inside others first, because a section with presets is no plain mapping.
    for key, folder in reversed(GROUPS.items()):
        *outer, name = key.split(".")
        inside = properties
        for section_name in outer:
            inside = inside.get(section_name, {}).get("properties", {})
        if name in inside:
            inside[name] = _with_presets(folder, inside[name])

    properties[BASE] = {
        "type": "string",
        "description": "a file to inherit from, relative to this file, such as configs/quickstart.yaml, "
        "which ships with megarl",
    }

    # Required keys may come from the inherited file.
    nested = {name: needed for name, each in properties.items() if (needed := each.pop("required", None))}
    # The root has no required keys of its own: all of them are in its sections.
    assert "required" not in section
    # Move the sections' required keys to the root, so that one condition covers them all.
    needed = {
        "required": list(nested),
        "properties": {name: {"required": keys} for name, keys in nested.items()},
    }

    return section | {"if": {"not": {"required": [BASE]}}, "then": needed}


def _with_presets(folder: str, section: Schema) -> Schema:
    """Return the schema of a section that may have a preset, or several that are combined.

    Its value is the preset's name, or a mapping with a preset under `base` and keys that override it.
    """
    preset: Schema = {
        "type": "string",
        "description": f"a built-in preset, or a file {folder}/NAME.yaml next to this file",
        "examples": [file.stem for file in sorted((CONFIGS_DIR / folder).glob("*.yaml"))],
    }
    several: list[Schema] = [{"type": "array", "items": preset}] if folder in COMBINED else []
    section["properties"][BASE] = {"anyOf": [preset, *several]} if several else preset

    return {"description": section.pop("description", ""), "anyOf": [preset, *several, section]}


def _preset() -> Schema:
    section = _section(AlgorithmConfig, AlgorithmConfig())
    others = _section(PPOConfig, PPOConfig())
    # `with` must not contain the preset's own section (the loader refuses it), and has no required keys.
    del others["properties"][PRESET]
    for each in others["properties"].values():
        each.pop("required", None)
    section["properties"] |= {
        BASE: {
            "type": "string",
            "description": "the path of a preset to inherit from, relative to this file",
        },
        WITH: others | {"description": "keys of other sections that the preset requires"},
    }

    return section


def _section(section: type, value: Any = None) -> Schema:
    """Return the schema of a section. Defaults come from `value`, if given, otherwise from the class."""
    types = key_types(section)
    properties: dict[str, Schema] = {}
    required = []

    for entry in in_order(section):
        default = getattr(value or default_of(section), entry.name)
        kind = types[entry.name]
        # A nested section takes its defaults from the parent's value, not from its own class.
        if is_dataclass(kind):
            properties[entry.name] = _section(typing.cast(type, kind), default)
            continue
        value_schema = _or_reference(_value(kind, range_of(entry)))
        # A single file instead of a list of files.
        if entry.metadata.get(PathKind) is PathKind.data and kind == list[str]:
            value_schema |= {"type": ["array", "string"], "not": {"const": "None"}}
            del value_schema["pattern"]
        properties[entry.name] = {"description": _description(section, entry, kind), **value_schema}
        if default == MISSING:
            required.append(entry.name)
        else:
            properties[entry.name]["default"] = contents_of(default)

    about = section_explanation(section)
    # A text instead of a section with a path is this path.
    kinds = ["object", "string"] if "path" in properties else "object"
    return (
        ({"description": about} if about else {})
        | {"type": kinds, "properties": properties, "additionalProperties": False}
        | ({"required": required} if required else {})
    )


def _description(section: type, entry: Field[Any], kind: Any) -> str:
    """Return the comments of a key and of each of its values if it is an enumeration, and when to set it."""
    choices = [member for choice in _enumerations(kind) for member in choice]
    when = when_to_change(entry)
    return "\n".join(
        [
            explanation(section, entry.name),
            *(f"- {each.value}: {explanation(type(each), each.name)}" for each in choices),
            *([f"When to set it: {when}"] if when else []),
        ]
    )


def _or_reference(value: Schema) -> Schema:
    """Allow a reference to another key, which the loader accepts for all types except booleans."""
    if "enum" in value:
        return {"anyOf": [value, {"type": "string", "pattern": _REFERENCE}]}
    types = _listed(value.get("type", []))
    if not types or "string" in types or "boolean" in types:
        return value

    return value | {"type": [*types, "string"], "pattern": _REFERENCE}


def _value(kind: Any, allowed: Range = _ANY_NUMBER) -> Schema:
    """Return the schema of a value of type `kind`."""
    parts = typing.get_args(kind)
    # An optional value: null is one more choice of an enumeration, or one more type.
    if type(None) in parts:
        (inner,) = (part for part in parts if part is not type(None))
        value = _value(inner, allowed)
        if "enum" in value:
            return {"enum": [*value["enum"], None]}
        return value | {"type": [*_listed(value["type"]), "null"]}

    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if kind is str:
        return {"type": "string", "not": {"const": "None"}}  # null is the only empty value
    if kind is bool:
        return {"type": "boolean"}
    if kind in (int, float):
        return {"type": "integer" if kind is int else "number", **_limits(allowed)}
    if typing.get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _or_reference(_value(parts[1]))}

    if typing.get_origin(kind) is list:
        (item,) = parts
        if is_dataclass(item):
            return {"type": "array", "items": _section(typing.cast(type, item)) | {"type": "object"}}
        length = allowed.length
        lengths = {} if length is None else {"minItems": length, "maxItems": length}
        return {"type": "array", "items": _or_reference(_value(item, allowed)), **lengths}

    assert kind is Any, kind
    return {}


def _limits(allowed: Range) -> Schema:
    """Return the limits of a range as the loader applies them, including LARGEST."""
    limits = {
        "minimum": allowed.at_least,
        "exclusiveMinimum": allowed.above,
        "maximum": allowed.at_most,
        "exclusiveMaximum": allowed.below,
    }
    # JSON has no infinity, so the loader's limit replaces an open end.
    given = {name: end for name, end in limits.items() if math.isfinite(end)}
    if "minimum" not in given and "exclusiveMinimum" not in given:
        given["minimum"] = -LARGEST
    if "maximum" not in given and "exclusiveMaximum" not in given:
        given["maximum"] = LARGEST

    return given


def _enumerations(kind: Any) -> list[type[Enum]]:
    """Return the enumeration of a key or of its list items, as a list of at most one element."""
    candidates = (kind, *typing.get_args(kind))
    return [each for each in candidates if isinstance(each, type) and issubclass(each, Enum)]


def _listed(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else list(types)


def explanation(owner: type, name: str) -> str:
    """Return the comments of a dataclass field or an enumeration member; an empty string if there are none.

    Args:
        owner: The class. An inherited field is described where it is defined.
        name: The field or the member.
    """
    # Skip base classes from elsewhere, such as Enum: their comments are not about this key.
    classes = [each for each in owner.__mro__ if each.__module__.startswith("megarl.")]
    texts = (_explanations(inspect.getsourcefile(each) or "").get((each.__name__, name)) for each in classes)
    return next((text for text in texts if text), "")


def section_explanation(section: type) -> str:
    """Return the docstring of a section in one line; an empty string if there is none."""
    text = section.__doc__ or ""
    return "" if text.startswith(f"{section.__name__}(") else " ".join(text.split())


@cache
def _explanations(file: str) -> dict[tuple[str, str], str]:
    """Return the comments of each field and member of the classes in a file, those above it and after it."""
    source = Path(file).read_text(encoding="utf-8")
    lines = source.splitlines()
    found = {}

    # Fields are annotated assignments; members of an enumeration are plain ones.
    for owner in [each for each in ast.parse(source).body if isinstance(each, ast.ClassDef)]:
        for node in owner.body:
            if not isinstance(node, ast.AnnAssign | ast.Assign):
                continue
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            assert isinstance(target, ast.Name)

            above = takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines[: node.lineno - 1]))
            after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode()
            texts = (each.strip().removeprefix("#").strip() for each in (*reversed([*above]), after))
            found[owner.name, target.id] = " ".join(
                text for text in texts if text and not text.startswith(("pyrefly:", "noqa"))
            )

    return found
