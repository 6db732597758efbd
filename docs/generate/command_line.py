"""Generates docs/cli.md: the help of every command, from the parser."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from unittest.mock import patch

from megarl.cli.main import build_parser

_WIDTH = "110"
_HEAD = """# Command line

This page lists every `megarl` command with its arguments. It is generated from the program, and `--help` prints the same text. A
configuration is a YAML file; `key.sub=value` after it overrides one value. `megarl check` reports all configuration errors before
anything starts. The exit code is 0 for success, 2 for a user or configuration error, and 1 for a runtime failure.

| command | description |
|---|---|
"""


def commands_page() -> str:
    """Return the page as Markdown."""
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
