"""Generate the part of docs/cli.md with the help of every command by group, and the former names, from the program."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

from megarl.cli.commands import COMMANDS, FIRST, GROUPS
from megarl.cli.main import FORMER, build_parser, commands_of

_WIDTH = "110"
_FORMER = """## Former names

These commands have another name now. Their command lines still work, with a message that contains the new one.

| former command of `megarl` | now |
|---|---|
"""


def commands() -> str:
    """Return the part as Markdown."""
    parsers = commands_of(build_parser())
    first = ", ".join(_link(name) for name in FIRST)
    parts = [f"To begin, six commands are enough: {first}.\n\n| command | description |\n|---|---|\n"]
    for group, names in _groups():
        parts.append(f"| **{group}** | |\n")
        parts += [f"| {_link(name)} | {COMMANDS[name].summary} |\n" for name in names]

    with patch.dict(os.environ, COLUMNS=_WIDTH):
        for group, names in _groups():
            parts.append(f"\n## {group}\n")
            parts += [_section(f"megarl {name}", parsers[name]) for name in names]

    parts += ["\n", _FORMER]
    parts += [f"| `{name}` | `{now}` |\n" for name, (now, _) in FORMER.items()]
    return "".join(parts)


def _groups() -> Iterator[tuple[str, list[str]]]:
    """Yield each group with the names of its commands."""
    for group in GROUPS:
        yield group, [name for name, command in COMMANDS.items() if command.group == group]


def _link(name: str) -> str:
    return f"[`megarl {name}`](#megarl-{name})"


def _section(title: str, command: argparse.ArgumentParser) -> str:
    text = f"\n### {title}\n\n```text\n{command.format_help().rstrip()}\n```\n"
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                text += f"\n```text\n{each.format_help().rstrip()}\n```\n"
    return text
