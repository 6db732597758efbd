"""The examples of the help are command lines that the parser takes, by files and keys that could be there."""

from __future__ import annotations

import ast
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from megarl.cli.commands import COMMANDS, GROUPS
from megarl.cli.main import build_parser, commands_of, in_argparse_order, main

EXAMPLES = {name: command.examples for name, command in COMMANDS.items()}
LINES = [(name, line) for name, lines in EXAMPLES.items() for line in lines if name != "completion"]


@pytest.mark.parametrize(("name", "line"), LINES)
def test_an_example_is_a_command_line(name: str, line: str) -> None:
    words = shlex.split(line)
    words = words[words.index("megarl") + 1 :]
    parser = build_parser()
    parsed = parser.parse_args(in_argparse_order(words, commands_of(parser)))
    assert parsed.command == name

    # The modules are called with their options by name. They may import torch, so they are only read.
    parts = COMMANDS[name].parts
    own = parameters_of(COMMANDS[name].module)
    assert own <= vars(parsed).keys() - parts.keys()
    taken = own.union(*map(parameters_of, parts.values()))
    if name in ("tune", "eval", "generate", "convert"):  # they take all other options
        taken |= vars(parsed).keys() - parts.keys()
    assert vars(parsed).keys() - {"command", "start"} - parts.keys() <= taken


def parameters_of(place: str) -> set[str]:
    """Return the parameters of the function at a place: `run` of a module, or MODULE:FUNCTION."""
    module, _, function = place.partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    functions = [
        each for each in ast.parse(Path(spec.origin).read_text()).body if isinstance(each, ast.FunctionDef)
    ]
    (run,) = (each for each in functions if each.name == (function or "run"))
    return {each.arg for each in run.args.args}


def test_every_option_of_a_command_is_taken_by_a_module() -> None:
    """Every part is selected by an option, and no option of the help is read by nothing."""
    for name, parser in commands_of(build_parser()).items():
        command = COMMANDS[name]
        options = {action.dest for action in parser._actions if action.option_strings} - {"help"}
        assert command.parts.keys() <= options, name
        assert set(command.owns_none_with) <= options, name
        assert command.group in GROUPS, name


def test_every_command_has_a_description_and_an_example() -> None:
    commands = commands_of(build_parser())
    assert set(EXAMPLES) == set(commands)

    for name, command in commands.items():
        assert command.description, name
        assert f"examples:\n  {EXAMPLES[name][0]}" in command.format_help()


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"    {name} " in said or f"    {name}\n" in said for name in EXAMPLES)
