"""Generate the part of docs/cli.md with the help of every command, from the parser."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

from megarl.cli.main import build_parser

_WIDTH = "110"
_HEAD = """| command | description |
|---|---|
"""


def commands() -> str:
    """Return the part as Markdown."""
    parser = build_parser()
    [(summaries, choices)] = _commands_of(parser)
    rows = "".join(f"| [`megarl {name}`](#megarl-{name}) | {summaries[name]} |\n" for name in choices)
    with patch.dict(os.environ, COLUMNS=_WIDTH):
        sections = [_section(f"megarl {name}", command) for name, command in choices.items()]

    return _HEAD + rows + "\n" + "\n".join(sections)


def _section(title: str, command: argparse.ArgumentParser) -> str:
    text = f"## {title}\n\n```text\n{command.format_help().rstrip()}\n```\n"
    for _, choices in _commands_of(command):
        text += "".join(f"\n```text\n{each.format_help().rstrip()}\n```\n" for each in choices.values())
    return text


def _commands_of(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[dict[str, str], dict[str, argparse.ArgumentParser]]]:
    """Yield the summaries and the parsers of a parser's subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield {each.dest: each.help or "" for each in action._choices_actions}, dict(action.choices)
