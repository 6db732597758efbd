"""Reorders the arguments of a command for argparse."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

_OVERRIDE = re.compile(r"[A-Za-z_+~][\w.\[\]]*=")
# Overrides written as options, as other programs accept them.
_OVERRIDE_AS_OPTION = re.compile(r"--(?=\w+\.[\w.\[\]]+(=|$)|(kind|algorithm|device)=)")


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, by the command's name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices


def in_argparse_order(arguments: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """Reorder the arguments of a command with overrides: options, then positional arguments, then overrides.

    argparse accepts positional arguments only as one block, but users put them anywhere. `--key.sub=value`
    and `--key.sub value` are overrides too.
    """
    # Commands without overrides keep argparse's own order.
    command = commands.get(arguments[0]) if arguments else None
    if command is None or all(action.dest != "overrides" for action in command._actions):
        return list(arguments)

    with_values = _options_with_values(command)
    own = {option for action in command._actions for option in action.option_strings}
    arguments = _with_plain_overrides(arguments, own)
    options: list[str] = []
    others: list[str] = []
    overrides: list[str] = []

    # The argument after an option that takes a value belongs to that option.
    for before, each in pairwise(arguments):
        is_option = each.startswith("-") or before in with_values
        kind = options if is_option else overrides if _OVERRIDE.match(each) else others
        kind.append(each)

    return [arguments[0], *options, *others, *overrides]


def _options_with_values(command: argparse.ArgumentParser) -> Collection[str]:
    return {option for action in command._actions if action.nargs != 0 for option in action.option_strings}


def _with_plain_overrides(arguments: Sequence[str], own: Collection[str]) -> list[str]:
    """Return the arguments with overrides in the form `key=value`, of whichever form they have.

    Args:
        own: The options of the command.
    """
    plain: list[str] = []
    waiting: str | None = None  # a key written as an option without "=", whose value comes next

    for each in arguments:
        if waiting is not None and not each.startswith("--"):
            plain.append(f"{waiting}={each}")
            waiting = None
            continue
        if waiting is not None:  # a flag without a value
            plain.append(f"{waiting}=true")
            waiting = None
        name, equals, value = each.partition("=")
        if name.startswith("--") and name not in own and _is_of_a_framework(name):
            key = name.removeprefix("--").replace("-", "_")
            if equals:
                plain.append(f"{key}={value}")
            else:
                waiting = key
        elif (match := _OVERRIDE_AS_OPTION.match(each)) is None:
            plain.append(each)
        elif "=" in each:
            plain.append(each[match.end() :])
        else:
            waiting = each[match.end() :]

    return [*plain, f"{waiting}=true"] if waiting is not None else plain


def _is_of_a_framework(option: str) -> bool:
    """Whether an option is an argument of another framework, which gets a migration hint as an override."""
    from megarl.config.migration import is_argument  # reads tables, which few command lines need

    return is_argument(option.removeprefix("--").replace("-", "_"))
