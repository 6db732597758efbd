"""JSON Schemas (draft 2020-12) of the configuration files, with which editors complete and check them:
`megarl schema`.

Everything comes from the typed schema: keys, types, ranges, choices and defaults, and the comments as
descriptions. A schema is about one file. What stands in several keys, or in other files, is for `megarl
check`.
"""

from __future__ import annotations

import math
import typing
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from typing import Any

from megarl.config.explanations import explanation, section_explanation
from megarl.config.review import key_types
from megarl.config.schema import SCHEMAS, AlgorithmConfig, PPOConfig, RunKind
from megarl.config.schema.keys import LARGEST, MISSING, ItemRange, Range, range_of
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import BASE, GROUPS, WITH

DRAFT = "https://json-schema.org/draft/2020-12/schema"
ANY_RUN = "run"
PRESET = "algorithm"
KINDS = (ANY_RUN, *(kind.value for kind in RunKind), PRESET)

Schema = dict[str, Any]

_REFERENCE = r"^\$\{.+\}$"  # to another key's value
_ANY_NUMBER = Range()


def json_schema(kind: str) -> Schema:
    """Return the schema of a file of one of KINDS: of any run, of one kind of run, or of a preset of the
    section `algorithm`."""
    if kind == PRESET:
        return {"$schema": DRAFT, "title": "A preset of the section algorithm", **_preset()}
    # Only `kind: sft` selects the supervised schema, because a file without a kind is PPO.
    if kind == ANY_RUN:
        is_sft = {"properties": {"kind": {"const": RunKind.sft.value}}, "required": ["kind"]}
        choice = {"if": is_sft, "then": _run(RunKind.sft), "else": _run(RunKind.ppo)}
        return {"$schema": DRAFT, "title": "A run of megarl", "type": "object", **choice}

    return {"$schema": DRAFT, "title": f"A run of megarl, kind: {kind}", **_run(RunKind(kind))}


def _run(kind: RunKind) -> Schema:
    root = SCHEMAS[kind]
    section = _section(root, root())
    properties = section["properties"]
    # A schema of one kind accepts no other value of `kind`.
    properties["kind"] = {"const": kind.value, "description": properties["kind"]["description"]}

    for name in GROUPS:
        if name in properties:
            properties[name] = _with_presets(name, properties[name])

    properties[BASE] = {
        "type": "string",
        "description": "a file to inherit from, relative to this one, such as configs/quickstart.yaml, "
        "which ships with megarl",
    }

    # What must be given may come from the inherited file.
    required = section.pop("required", None)
    nested = {name: needed for name, each in properties.items() if (needed := each.pop("required", None))}
    # The root has no required keys of its own: all of them are in its sections.
    assert required is None
    # Requirements of sections are stated at the root, so that one condition covers them all.
    needed = {
        "required": list(nested),
        "properties": {name: {"required": keys} for name, keys in nested.items()},
    }

    return section | {"if": {"not": {"required": [BASE]}}, "then": needed}


def _with_presets(name: str, section: Schema) -> Schema:
    """The section, or the name of a ready-made one, which stands alone or, below `base`, beside the keys that
    it changes."""
    presets = [file.stem for file in sorted((CONFIGS_DIR / name).glob("*.yaml"))]
    preset = {
        "type": "string",
        "description": f"a preset of megarl, or a file {name}/NAME.yaml beside this one",
        "examples": presets,
    }
    section["properties"][BASE] = preset

    return {"description": section.pop("description", ""), "anyOf": [preset, section]}


def _preset() -> Schema:
    section = _section(AlgorithmConfig, AlgorithmConfig())
    others = _section(PPOConfig, PPOConfig())
    # `with` may not hold the preset's own section (the loader refuses it), and requires no key.
    del others["properties"][PRESET]
    for each in others["properties"].values():
        each.pop("required", None)
    section["properties"] |= {
        BASE: {
            "type": "string",
            "description": "a preset to inherit from, as the path of its file, relative to this one",
        },
        WITH: others | {"description": "keys of other sections that the preset needs"},
    }

    return section


def _section(section: type, value: Any = None) -> Schema:
    """The schema of a section. Its keys have the defaults that they have in `value`, or those of the
    class."""
    types = key_types(section)
    properties: dict[str, Schema] = {}
    required = []

    for entry in fields(section):
        default = getattr(value, entry.name) if value is not None else _default(entry)
        kind = types[entry.name]
        # A nested section takes its defaults from the parent's value, and not from its own class.
        if is_dataclass(kind):
            properties[entry.name] = _section(typing.cast(type, kind), default)
            continue
        value_schema = _or_reference(_value(kind, range_of(entry), entry.metadata.get(ItemRange)))
        properties[entry.name] = {"description": _description(section, entry.name, kind), **value_schema}
        if default == MISSING or default is NO_DEFAULT:
            required.append(entry.name)
        else:
            properties[entry.name]["default"] = _plain(default)

    about = section_explanation(section)
    return (
        ({"description": about} if about else {})
        | {"type": "object", "properties": properties, "additionalProperties": False}
        | ({"required": required} if required else {})
    )


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is NO_DEFAULT else entry.default_factory()


def _description(section: type, name: str, kind: Any) -> str:
    """Return what the comments say of a key, and of each value where it takes one of several."""
    choices = [member for choice in _enumerations(kind) for member in choice]
    return "\n".join(
        [
            explanation(section, name),
            *(f"- {each.value}: {explanation(type(each), each.name)}" for each in choices),
        ]
    )


def _or_reference(value: Schema) -> Schema:
    """A value, or a reference to another key's, which the loader takes for all but true and false."""
    if "enum" in value:
        return {"anyOf": [value, {"type": "string", "pattern": _REFERENCE}]}
    types = _listed(value.get("type", []))
    if not types or "string" in types or "boolean" in types:
        return value

    return value | {"type": [*types, "string"], "pattern": _REFERENCE}


def _value(kind: Any, allowed: Range = _ANY_NUMBER, items: ItemRange | None = None) -> Schema:
    """A value of the type `kind`; `items` says more of a list of numbers."""
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
        return {"type": "string", "not": {"const": "None"}}  # which is null here
    if kind is bool:
        return {"type": "boolean"}
    if kind in (int, float):
        return {"type": "integer" if kind is int else "number", **_limits(allowed)}
    if typing.get_origin(kind) is dict:
        return {"type": "object", "additionalProperties": _or_reference(_value(parts[1]))}

    if typing.get_origin(kind) is list:
        (item,) = parts
        if is_dataclass(item):
            return {"type": "array", "items": _section(typing.cast(type, item))}
        inner = _value(item) if items is None else _value(item, items.range)
        lengths = {} if items is None else {"minItems": items.length, "maxItems": items.length}
        return {"type": "array", "items": _or_reference(inner), **lengths}

    assert kind is Any, kind
    return {}


def _limits(allowed: Range) -> Schema:
    """The range as the loader takes it, which refuses what is beyond LARGEST."""
    limits = {
        "minimum": allowed.at_least,
        "exclusiveMinimum": allowed.above,
        "maximum": allowed.at_most,
        "exclusiveMaximum": allowed.below,
    }
    # JSON has no infinity, so an open end is replaced by the loader's own limit.
    given = {name: end for name, end in limits.items() if math.isfinite(end)}
    if "minimum" not in given and "exclusiveMinimum" not in given:
        given["minimum"] = -LARGEST
    if "maximum" not in given and "exclusiveMaximum" not in given:
        given["maximum"] = LARGEST

    return given


def _enumerations(kind: Any) -> list[type[Enum]]:
    """The enumeration whose members a key takes, or takes a list of; none or one."""
    candidates = (kind, *typing.get_args(kind))
    return [each for each in candidates if isinstance(each, type) and issubclass(each, Enum)]


def _listed(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else list(types)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
