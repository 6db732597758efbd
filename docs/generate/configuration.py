"""Generate the part of `docs/configuration.md` that lists the keys of `megarl/config/schema`.

It has every key with its type, default, values and description.
"""

from __future__ import annotations

import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from typing import Any

import yaml

from docs.generate.papers import link_papers
from megarl.config import schema
from megarl.config.json_schema import explanation, section_explanation
from megarl.config.readers import needs_in_words
from megarl.config.schema.keys import Range, leaves, range_of, when_to_change
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import WITH
from megarl.config.values import item_section, key_types

_PRESETS = CONFIGS_DIR / "algorithm"
_TOP_LEVEL = "top-level keys"


def reference() -> str:
    """Return the part as Markdown.

    Raises:
        ValueError: A key has no comment.
    """
    seen: _Seen = {}
    parts = [*_first_keys(), "## RL runs (`megarl train`)\n"]
    parts += _sections(schema.PPOConfig, seen)
    parts += ["## Supervised fine-tuning (`kind: sft`)\n"]
    same = [
        name
        for name, kind in key_types(schema.SFTConfig).items()
        if key_types(schema.PPOConfig).get(name) == kind
    ]
    parts += [f"{', '.join(f'`{name}`' for name in same)} are as above. `actor` is the trained model.\n"]
    parts += _sections(schema.SFTConfig, seen, prefix="sft: ", leave_out=same)
    parts += ["## Pairs of answers (`kind: dpo`, `kind: reward_model`)\n"]
    names = ", ".join(f"`{name}`" for name in same)
    parts += [
        f"{names} are as above. `actor` is the trained model. See [DPO and reward models](algorithms/supervised.md#pairs).\n"
    ]
    of_dpo = key_types(schema.DPOConfig)
    parts += _sections(schema.DPOConfig, seen, prefix="dpo: ", leave_out=same)
    same_as_dpo = [
        name for name, kind in key_types(schema.RewardModelRunConfig).items() if of_dpo.get(name) == kind
    ]
    parts += _sections(schema.RewardModelRunConfig, seen, prefix="reward_model: ", leave_out=same_as_dpo)

    return link_papers("\n".join([*parts, *_presets()]))


def _first_keys() -> Iterator[str]:
    """Yield the table of the keys that most runs set."""
    yield "## The keys that most runs set\n"
    yield "The other keys have defaults that fit most runs. `algorithm` is the name of a [preset](#presets).\n"
    rows = ["| key | default | when to set it |", "|---|---|---|"]
    found: dict[Field[Any], str] = {}
    for key, entry, default in _marked(schema.PPOConfig()):
        # The actor's section is the first of its type; others differ from it in few runs.
        if found.setdefault(entry, key) == key:
            section = key.rpartition(".")[0] or key
            shown = "a preset" if is_dataclass(default) else _shown(default)
            rows.append(f"| [`{key}`](#{_anchor(section)}) | {shown} | {cell(when_to_change(entry))} |")
    yield "\n".join(rows) + "\n"


def _marked(section: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield the keys that most runs set, with their fields and defaults."""
    for entry in fields(section):
        default = getattr(section, entry.name)
        if when_to_change(entry):
            yield f"{prefix}{entry.name}", entry, default
        if is_dataclass(default):
            yield from _marked(default, f"{prefix}{entry.name}.")


# What the page has described, with its heading and default value: sections by their type, and single keys by the
# class that declares them and their name. Classes that inherit them have the same keys.
_Seen = dict[type | tuple[type, str], tuple[str, Any]]
# Keys that have their rows elsewhere: each with its default, the heading of its row, and the default there.
_Elsewhere = list[tuple[str, Any, str, Any]]


def _sections(
    root: type, seen: _Seen, prefix: str = "", leave_out: typing.Sequence[str] = ()
) -> Iterator[str]:
    plain = []
    elsewhere: _Elsewhere = []
    for entry in fields(root):
        kind = key_types(root)[entry.name]
        default = _default(entry)
        if entry.name in leave_out:
            continue
        if is_dataclass(kind):
            yield from _section(typing.cast(type, kind), default, entry.name, seen, prefix, entry)
        else:
            plain.append(_row(root, entry, entry.name, default))
            if (item := item_section(kind)) is not None:
                plain += _rows_of_item(item(), f"{entry.name}[]", _TOP_LEVEL, seen, elsewhere)

    if plain:
        yield from [f"### {_TOP_LEVEL}\n", *_table(plain), *_references(elsewhere)]


def _section(
    section: type, value: Any, key: str, seen: _Seen, prefix: str, declared: Field[Any] | None = None
) -> Iterator[str]:
    """Yield a heading, the description of the section, its own keys, and its nested sections.

    A section of a type that the page has described refers to it, and so does an inherited key.
    """
    heading = f"{prefix}{key}"
    yield f"### {heading}\n"
    elsewhere: _Elsewhere = []
    if section in seen:
        elsewhere += _same_keys(value, key, *seen[section])
        yield from _references(elsewhere)
    elif about := section_explanation(section):
        yield about + "\n"
    for line in needs_in_words(declared) if declared is not None else []:
        yield f"This section has an effect {line}.\n"
    if section in seen:
        return

    seen[section] = (heading, value)
    if rows := [*_rows(value, key, heading, seen, elsewhere)]:
        yield from _table(rows)
    yield from _references(elsewhere)
    for entry in fields(section):
        inner = getattr(value, entry.name)
        if is_dataclass(inner):
            yield from _section(type(inner), inner, f"{key}.{entry.name}", seen, prefix, entry)


def _rows(value: Any, key: str, heading: str, seen: _Seen, elsewhere: _Elsewhere) -> Iterator[str]:
    """Yield the rows of a section's own keys, and add those that the page has described to `elsewhere`."""
    section = type(value)
    for entry in fields(section):
        kind = key_types(section)[entry.name]
        name = f"{key}.{entry.name}"
        default = getattr(value, entry.name)
        declared = (_declaring(section, entry), entry.name)
        if is_dataclass(kind):
            continue
        if declared in seen:
            elsewhere.append((name, default, *seen[declared]))
            continue
        seen[declared] = (heading, default)
        yield _row(section, entry, name, default)
        if (item := item_section(kind)) is not None:
            yield from _rows_of_item(item(), f"{name}[]", heading, seen, elsewhere)


def _rows_of_item(value: Any, key: str, heading: str, seen: _Seen, elsewhere: _Elsewhere) -> Iterator[str]:
    """Yield the rows of a section that is an item of a list, with those of its nested sections."""
    yield from _rows(value, key, heading, seen, elsewhere)
    for entry in fields(value):
        inner = getattr(value, entry.name)
        if is_dataclass(inner) and type(inner) in seen:
            elsewhere += _same_keys(inner, f"{key}.{entry.name}", *seen[type(inner)])
        elif is_dataclass(inner):
            yield from _rows_of_item(inner, f"{key}.{entry.name}", heading, seen, elsewhere)


def _declaring(section: type, entry: Field[Any]) -> type:
    """Return the class that declares and describes a key of a section. A subclass may change its default."""
    text = explanation(section, entry.name)
    declaring = [each for each in section.__mro__ if entry.name in getattr(each, "__dataclass_fields__", ())]
    return next(each for each in reversed(declaring) if explanation(each, entry.name) == text)


def _same_keys(value: Any, key: str, heading: str, described: Any) -> _Elsewhere:
    """Return the keys of a section that has the same keys as a described one."""
    pairs = zip(leaves(value, prefix=f"{key}."), leaves(described), strict=True)
    return [(here.key, here.value, heading, there.value) for here, there in pairs]


def _references(elsewhere: _Elsewhere) -> Iterator[str]:
    """Yield a line for each section that has the rows of these keys, and the defaults that are different here."""
    for heading in dict.fromkeys(heading for _, _, heading, _ in elsewhere):
        keys = [each for each in elsewhere if each[2] == heading]
        names = ", ".join(f"`{key}`" for key, *_ in keys)
        differing = [
            f" The default of `{key}` is {_shown(default)}."
            for key, default, _, usual in keys
            if default != usual
        ]
        yield f"As in [`{heading}`](#{_anchor(heading)}): {names}.{''.join(differing)}\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[.:]", "", heading).replace(" ", "-")


def _table(rows: list[str]) -> list[str]:
    return ["\n".join(["| key | type | default | description |", "|---|---|---|---|", *rows]) + "\n"]


def _row(owner: type, entry: Field[Any], key: str, default: Any) -> str:
    text = explanation(owner, entry.name)
    if not text:
        raise ValueError(
            f"{owner.__module__}: {owner.__name__}.{entry.name} has no comment; describe {key} in a comment "
            f"after or above it"
        )

    kind = key_types(owner)[entry.name]
    choices = [
        f"`{member.value}`: {explanation(choice, member.name)}"
        for choice in _choices(kind)
        for member in choice
    ]
    return (
        f"| `{key}` | {_values(kind, range_of(entry))} | {_shown(default)} | "
        f"{'<br>'.join(cell(line) for line in (text, *choices, *needs_in_words(entry)))} |"
    )


def _values(kind: Any, allowed: Range) -> str:
    if allowed.length is not None:
        return f"list of {allowed}"
    name = _type_name(kind)
    return name if allowed == Range() else f"{name}, {allowed}"


def _type_name(kind: Any) -> str:
    """Return the name of a type, such as `string`, `list of integers` or `enum or null`."""
    names = {int: "integer", float: "number", bool: "boolean", str: "string", Any: "any value"}
    if kind in names:
        return names[kind]
    if is_dataclass(kind):
        return "object"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "enum"

    parts = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return f"list of {_type_name(parts[0])}s"
    if typing.get_origin(kind) is dict:
        return f"map of string to {_type_name(parts[1])}"

    # The only remaining type is a union, for a value that may be null.
    return " or ".join("null" if part is type(None) else _type_name(part) for part in parts)


def _shown(value: Any) -> str:
    if value == schema.MISSING or value is NO_DEFAULT:
        return "required"
    plain = [_plain(item) for item in value] if isinstance(value, list) else _plain(value)
    return f"`{yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix(chr(10)).removesuffix('...').strip()}`"


def cell(text: str) -> str:
    """Escape text for a table cell, and asterisks outside code."""
    return "`".join(
        part if index % 2 else part.replace("*", "\\*")
        for index, part in enumerate(text.replace("|", "\\|").split("`"))
    )


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield (
        "Select a preset with `algorithm=NAME`. The files are in `configs/algorithm`. "
        "[Algorithms](algorithms/index.md) describes each of them.\n"
    )

    for file in sorted(_PRESETS.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
        yield f"### {file.stem}\n"
        yield " ".join(comments) + "\n"
        body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        yield f"```yaml\n{_as_in_a_run(body)}\n```\n"


def _as_in_a_run(preset: str) -> str:
    """Return the settings of a preset as a run's file would contain them.

    `base` names another preset, and keys of other sections are at the top level.
    """
    own, _, others = re.sub(r"(?m)^base: (\w+)\.yaml$", r"base: \1", preset).partition(f"\n{WITH}:")
    more = textwrap.dedent(others.partition("\n")[2]).rstrip()
    return f"algorithm:\n{_indented(own)}" + (f"\n{more}" if more else "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _choices(kind: Any) -> list[type[Enum]]:
    """Return the enumeration of a key that may be null, or of its list items, as a list of at most one element."""
    return [
        item for item in typing.get_args(kind) or [kind] if isinstance(item, type) and issubclass(item, Enum)
    ]


def _default(entry: Any) -> Any:
    return (
        entry.default_factory()
        if entry.default is NO_DEFAULT and entry.default_factory is not NO_DEFAULT
        else entry.default
    )
