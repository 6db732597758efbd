"""The examples of the help are command lines that the parser takes, by files and keys that could be there."""

from __future__ import annotations

import shlex

import pytest

from megarl.cli.main import commands_of, in_argparse_order, main
from megarl.cli.parser import build_parser
from megarl.cli.run.examples import EXAMPLES

LINES = [
    (name, line)
    for name, lines in EXAMPLES.items()
    for line in lines
    if name not in ("convert", "completion")
]


@pytest.mark.parametrize(("name", "line"), LINES)
def test_an_example_is_a_command_line(name: str, line: str) -> None:
    words = shlex.split(line)
    words = words[words.index("megarl") + 1 :]
    parser = build_parser()
    parsed = parser.parse_args(in_argparse_order(words, commands_of(parser)))
    assert parsed.command == name


def test_every_command_has_a_description_and_an_example() -> None:
    parser = build_parser()
    [commands] = [
        action for action in parser._actions if hasattr(action, "choices") and action.dest == "command"
    ]
    assert set(EXAMPLES) == set(commands.choices)

    for name, command in commands.choices.items():
        assert command.description, name
        assert f"examples:\n  {EXAMPLES[name][0]}" in command.format_help()


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"    {name} " in said or f"    {name}\n" in said for name in EXAMPLES)
