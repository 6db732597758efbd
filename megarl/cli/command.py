"""A command of `megarl` as a row of a table: its options, and the module with the function that runs it."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

Adds = Callable[[argparse._ActionsContainer], object]  # adds an argument, or several, to a parser


def argument(*names: str, **settings: Any) -> Adds:
    """Return what adds an argument, given as for `add_argument` of argparse."""
    return lambda parser: parser.add_argument(*names, **settings)


def overrides(help_text: str) -> Adds:
    """Return what adds the positional arguments `key=value`."""
    # Without a default, argparse's errors name them as required.
    return argument("overrides", metavar="key=value", nargs="*", default=[], help=help_text)


def group(title: str, *arguments: Adds) -> Adds:
    """Return what adds arguments under a title in the help."""
    return lambda parser: _add(arguments, parser.add_argument_group(title))


def one_of(*arguments: Adds) -> Adds:
    """Return what adds arguments of which only one may be given."""
    return lambda parser: _add(arguments, parser.add_mutually_exclusive_group())


def _add(arguments: tuple[Adds, ...], parser: argparse._ActionsContainer) -> None:
    for add in arguments:
        add(parser)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command. Its module is imported when it runs.

    Attributes:
        module: The module whose function `run` runs the command. Its parameters are the options.
        arguments: What add the arguments, in the order of the help.
        examples: Command lines for the help and the documentation. A test parses all of them.
        description: The first lines of the help; None: the summary.
        abbreviates: Whether options may be abbreviated.
        owns_processes: Whether the processes that the command starts end with it.
        extend: Adds subcommands, which say what they run.
    """

    module: str
    summary: str
    arguments: tuple[Adds, ...] = ()
    examples: tuple[str, ...]
    description: str | None = None
    abbreviates: bool = False
    owns_processes: bool = False
    extend: Callable[[argparse.ArgumentParser], None] | None = None

    def add_to(self, commands: argparse._SubParsersAction, name: str) -> None:
        """Add the parser of the command, under its name."""
        parser = commands.add_parser(
            name,
            help=self.summary,
            description=self.description or self.summary,
            allow_abbrev=self.abbreviates,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog="\n".join(["examples:", *(f"  {line}" for line in self.examples)]),
        )
        _add(self.arguments, parser)
        parser.set_defaults(start=partial(_start, self.module))
        if self.extend is not None:
            self.extend(parser)


def _start(module: str, parsed: argparse.Namespace) -> int:
    options = {name: value for name, value in vars(parsed).items() if name not in ("command", "start")}
    return importlib.import_module(module).run(**options)
