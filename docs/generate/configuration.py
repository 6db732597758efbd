"""`docs/configuration.md`: every key of `megarl/config/schema`, with its type, default, values, and what its
comments say."""

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

from megarl.config import schema
from megarl.config.explanations import explanation, section_explanation
from megarl.config.review import expected
from megarl.config.schema.keys import Range, range_of
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import WITH

_PRESETS = CONFIGS_DIR / "algorithm"
_INTRODUCTION = """# Configuration reference

Made from `megarl/config/schema` by `make reference`; the comments there are what you read here.

A configuration is a YAML file, which says its `kind`. `base: other.yaml` inherits another. `algorithm: grpo` takes a
[preset](#presets); `algorithm: {base: grpo, kl: {coefficient: 0.01}}` takes one and changes it. On the command line `key.sub=value`
overrides one value, and wins.

What a run reads (models, data, reward files, `base`) is relative to the file that names it, wherever the command is typed; what an
override names, and what a run writes (`trainer.output_dir`, `checkpoint.dir`), to the current folder. A preset of your own is a file
`algorithm/NAME.yaml` beside yours. The files that ship with megarl are `configs/NAME.yaml` in every folder, for commands and for `base`;
the models and data that they name are looked for in the current folder. Rewards that ship have one name too, such as
`megarl/recipes/math/reward.py`.

An unknown key is refused, and so is a value that is not of its type or range, or that makes no sense beside
another; `megarl check` lists all of that at once.

## In an editor

`megarl schema` prints a JSON Schema (draft 2020-12) of any run: keys, types, ranges, choices, defaults, and the explanations of this page.
An editor with a [YAML language server](https://github.com/redhat-developer/yaml-language-server), as VS Code with Red Hat's YAML
extension, completes and checks a file that names it in its first line. `megarl init` writes both; for a file of yours:

```bash
megarl schema > megarl.schema.json
```

```yaml
# yaml-language-server: $schema=megarl.schema.json
kind: ppo
base: configs/quickstart.yaml
trainer:
  total_steps: 20
```

The path is relative to the file. `megarl schema algorithm` is for presets, `megarl schema ppo` and `megarl schema sft` are for one kind of
run. The schema knows one file and one key at a time, so that `megarl check` has the last word.
"""


def reference() -> str:
    """The page. Raises ValueError for a key that no comment explains."""
    parts = [_INTRODUCTION, "## Of an RL run (`megarl train`)\n"]
    parts += _sections(schema.PPOConfig)
    parts += ["## Of a supervised run (`megarl sft`)\n"]
    same = [
        name for name, kind in _types(schema.SFTConfig).items() if _types(schema.PPOConfig).get(name) == kind
    ]
    parts += [f"{', '.join(f'`{name}`' for name in same)} are as above; `actor` is the trained model.\n"]
    parts += _sections(schema.SFTConfig, prefix="sft: ", leave_out=same)

    return "\n".join([*parts, *_presets()])


def _sections(root: type, prefix: str = "", leave_out: typing.Sequence[str] = ()) -> Iterator[str]:
    plain = []
    for entry in fields(root):
        kind = _types(root)[entry.name]
        default = _default(entry)
        if entry.name in leave_out:
            continue
        if is_dataclass(kind):
            yield from _section(typing.cast(type, kind), default, entry.name, prefix)
        else:
            plain.append(_row(root, entry, entry.name, default))

    if plain:
        yield from ["### without a section\n", *_table(plain)]


def _section(section: type, value: Any, key: str, prefix: str) -> Iterator[str]:
    """A heading, what the section is for, its own keys; then the sections in it."""
    yield f"### {prefix}{key}\n"
    if about := section_explanation(section):
        yield about + "\n"
    inner = []
    rows = []

    for entry in fields(section):
        kind = _types(section)[entry.name]
        default = getattr(value, entry.name)
        if is_dataclass(kind):
            inner.append((typing.cast(type, kind), default, f"{key}.{entry.name}"))
        else:
            rows.append(_row(section, entry, f"{key}.{entry.name}", default))
            if (item := _item(kind)) is not None:
                rows += [
                    _row(item, each, f"{key}.{entry.name}[].{each.name}", _default(each))
                    for each in fields(item)
                ]

    if rows:
        yield from _table(rows)
    for kind, default, inner_key in inner:
        yield from _section(kind, default, inner_key, prefix)


def _table(rows: list[str]) -> list[str]:
    return ["\n".join(["| key | value | default | |", "|---|---|---|---|", *rows]) + "\n"]


def _row(owner: type, entry: Field[Any], key: str, default: Any) -> str:
    text = explanation(owner, entry.name)
    if not text:
        raise ValueError(
            f"{owner.__module__}: {owner.__name__}.{entry.name} has no comment; say behind it or above it "
            f"what {key} is for"
        )

    kind = _types(owner)[entry.name]
    choices = [
        f"`{member.value}`: {explanation(choice, member.name)}"
        for choice in _choices(kind)
        for member in choice
    ]
    return (
        f"| `{key}` | {_values(kind, range_of(entry))} | {_shown(default)} | "
        f"{'<br>'.join(cell(line) for line in (text, *choices))} |"
    )


def _values(kind: Any, allowed: Range) -> str:
    words = expected(kind)
    for choice in _choices(kind):
        words = words.replace(expected(choice), "one of these")
    return words if allowed == Range() else f"{words}, {allowed}"


def _shown(value: Any) -> str:
    if value == schema.MISSING or value is NO_DEFAULT:
        return "must be given"
    plain = [_plain(item) for item in value] if isinstance(value, list) else _plain(value)
    return f"`{yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix(chr(10)).removesuffix('...').strip()}`"


def cell(text: str) -> str:
    """In a table, and with no mark of emphasis outside code."""
    return "`".join(
        part if index % 2 else part.replace("*", "\\*")
        for index, part in enumerate(text.replace("|", "\\|").split("`"))
    )


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    yield (
        "`algorithm=NAME`, the files of `configs/algorithm`. [Algorithms](algorithms/index.md) says what each "
        "is for.\n"
    )

    for file in sorted(_PRESETS.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        comments = [line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#")]
        yield f"### {file.stem}\n"
        yield " ".join(comments) + "\n"
        body = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        yield f"```yaml\n{_as_in_a_run(body)}\n```\n"


def _as_in_a_run(preset: str) -> str:
    """The same settings in a file of one's own: another preset has its name, and what is of other sections
    stands beside."""
    own, _, others = re.sub(r"(?m)^base: (\w+)\.yaml$", r"base: \1", preset).partition(f"\n{WITH}:")
    beside = textwrap.dedent(others.partition("\n")[2]).rstrip()
    return f"algorithm:\n{_indented(own)}" + (f"\n{beside}" if beside else "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _choices(kind: Any) -> list[type[Enum]]:
    """The enumeration that a key takes a member of, or a list of members; none or one."""
    item = typing.get_args(kind)[0] if typing.get_origin(kind) is list else kind
    return [item] if isinstance(item, type) and issubclass(item, Enum) else []


def _item(kind: Any) -> type | None:
    """The section that a list is made of."""
    item = typing.get_args(kind)[0] if typing.get_origin(kind) is list else None
    return item if is_dataclass(item) and isinstance(item, type) else None


def _types(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _default(entry: Any) -> Any:
    return (
        entry.default_factory()
        if entry.default is NO_DEFAULT and entry.default_factory is not NO_DEFAULT
        else entry.default
    )
