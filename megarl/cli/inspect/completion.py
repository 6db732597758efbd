"""`megarl completion SHELL`: shell completion of commands, options, files and keys of overrides."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import argcomplete

from megarl.config.load import schema_of
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR, shown
from megarl.config.values import schema_keys
from megarl.machine.errors import ConfigError


def run(shell: str) -> None:
    """Print the shell code that enables completion."""
    print(argcomplete.shellcode(["megarl"], shell=shell))


def answer(parser: argparse.ArgumentParser) -> None:
    """Print the completions for the shell, and exit."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    completers = {"config_path": _configs, "overrides": _keys, "key": _names}

    # Attach the completers to the positional arguments of all commands.
    for command in commands.choices.values():
        for action in command._actions:
            if action.dest in completers and not action.option_strings:
                action.completer = completers[action.dest]

    argcomplete.autocomplete(parser)


def _configs(prefix: str, **_: object) -> Iterator[str]:
    yield from argcomplete.FilesCompleter(("yaml", "yml"))(prefix)
    yield from (shown(file) for file in sorted(CONFIGS_DIR.glob("*.yaml")))


def _names(prefix: str, **_: object) -> Iterator[str]:
    """Yield the keys and sections of a reinforcement learning run, for `megarl explain`."""
    yield from schema_keys(PPOConfig)


def _keys(parsed_args: argparse.Namespace, **_: object) -> Iterator[str]:
    """Yield the keys of the kind of run that the file describes; those of PPO if it cannot be read."""
    try:
        schema = schema_of(parsed_args.config_path) if parsed_args.config_path else PPOConfig
    except ConfigError:
        schema = PPOConfig

    keys = list(schema_keys(schema))
    yield from (f"{key}=" for key in keys if not any(other.startswith(f"{key}.") for other in keys))
