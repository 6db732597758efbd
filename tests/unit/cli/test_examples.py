"""The examples of the help are command lines that the parser takes, by files and keys that could be there."""

from __future__ import annotations

import ast
import shlex
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from megarl.cli.commands import COMMANDS
from megarl.cli.inspect.tune import TuneOptions
from megarl.cli.main import build_parser, commands_of, in_argparse_order, main

EXAMPLES = {name: command.examples for name, command in COMMANDS.items()}
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

    # The command is called with its options by name. Its module may import torch, so it is only read.
    if isinstance(parsed.start, partial):
        (module,) = parsed.start.args
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        functions = [
            each
            for each in ast.parse(Path(spec.origin).read_text()).body
            if isinstance(each, ast.FunctionDef)
        ]
        (run,) = (each for each in functions if each.name == "run")
        parameters = {each.arg for each in run.args.args}
        if run.args.kwarg is not None:
            assert name in ("tune", "eval", "generate")
            parameters |= (
                vars(parsed).keys() if name != "tune" else {each.name for each in fields(TuneOptions)}
            )
            parameters -= {"command", "start"}
        assert vars(parsed).keys() - {"command", "start"} == parameters


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
