"""Shared parts of the commands' parsers."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial

Commands = argparse._SubParsersAction


def add_run_command(
    commands: Commands, name: str, summary: str, start: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add a subcommand that reads a configuration."""
    command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    command.add_argument(
        "config_path",
        metavar="CONFIG",
        help="a YAML file; configs/quickstart.yaml and others are included in megarl",
    )
    add_overrides(command, "such as trainer.total_steps=10 or algorithm=grpo")
    command.set_defaults(start=start)

    return command


def add_overrides(command: argparse.ArgumentParser, help_text: str) -> None:
    """Add the positional arguments `key=value` of a command."""
    # Without a default, argparse's errors name them as required.
    command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=help_text)


def starts(command: str, package: str = "megarl.cli") -> Callable[[argparse.Namespace], int]:
    """Return a function that runs a command, whose parameters have the names of its options."""
    return partial(_start, f"{package}.{command}")


def _start(module: str, parsed: argparse.Namespace) -> int:
    options = {name: value for name, value in vars(parsed).items() if name not in ("command", "start")}
    return importlib.import_module(module).run(**options)


def run_of(command: str) -> Callable[..., int]:
    """Import a command's module and return the function that runs the command."""
    return importlib.import_module(f"megarl.cli.{command}").run
