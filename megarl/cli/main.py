"""The command `megarl`: parses the command line, runs the subcommand, and returns an exit code.

0 is success, 2 is a user or configuration error with a message, and 1 is a runtime failure that
failure_report.py reports. A subcommand's module is imported only when it runs, so `megarl check` and `megarl
--help` do not need torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from megarl import __version__
from megarl.cli.commands import COMMANDS, FIRST, GROUPS
from megarl.cli.options import OVERRIDE
from megarl.cli.run.context import INTERRUPTED, RunContext, RunFailedError, ends_by_signal
from megarl.machine.errors import ConfigError
from megarl.machine.garbage import collect_rarely
from megarl.machine.reaper import end_processes_of, owned_processes

READER_GONE = 128 + signal.SIGPIPE  # as a shell reports a program that SIGPIPE ended
FAILED = 1
USER_ERROR = 2

# Overrides written as options, as other programs accept them.
_OVERRIDE_AS_OPTION = re.compile(r"--(?=\w+\.[\w.\[\]]+(=|$)|(kind|algorithm|device)=)")
_EXAMPLES = """examples:
  megarl quickstart                                        train a tiny model in minutes on two cores
  megarl init my_run --model MODEL_DIR --data rows.jsonl   create the files of your own run
  megarl check my_run/run.yaml                             report all configuration errors
  megarl train my_run/run.yaml                             train; the same command resumes
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A wrong command line exits in argparse, with code 2."""
    collect_rarely()
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        importlib.import_module("megarl.cli.inspect.completion").answer(parser)
    given = sys.argv[1:] if arguments is None else arguments
    if not given:
        parser.print_help(sys.stderr)
        return USER_ERROR

    if given[0] in FORMER:
        print(message(given), file=sys.stderr)
    try:
        given = in_current_words(given)
    except ValueError as error:
        print(f"megarl {given[0]}: {error}", file=sys.stderr)
        return USER_ERROR
    parsed, unknown = parser.parse_known_args(in_argparse_order(given, commands_of(parser)))
    if unknown:
        # The usage is that of the command, with its options.
        hint = "; write settings as key=value" if "overrides" in parsed else ""
        commands_of(parser)[parsed.command].error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    try:
        # Every process that the command starts ends with it, however it ends.
        with _own_processes(parsed):
            return parsed.start(parsed)
    except KeyboardInterrupt as interrupted:
        print(
            "; ".join([f"megarl {parsed.command}: interrupted", *map(str, interrupted.args)]), file=sys.stderr
        )
        return INTERRUPTED
    except RunFailedError as failed:
        return _end(failed.error, parsed.command, failed.context)
    except BrokenPipeError as error:
        return READER_GONE if _reader_is_gone() else _end(error, parsed.command, None)
    except Exception as error:  # noqa: BLE001  (the boundary of the process)
        return _end(error, parsed.command, None)


def _reader_is_gone() -> bool:
    """Whether the program that read the standard output has ended, as `head` does.

    If it has, the rest of the output is discarded.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors are reported for any event mask
    is_gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


@contextmanager
def _own_processes(parsed: argparse.Namespace) -> Generator[None]:
    """End all processes of a command when the command ends, however it ends."""
    command = COMMANDS[parsed.command]
    if not command.owns_processes or any(getattr(parsed, option) for option in command.owns_none_with):
        yield
        return
    with owned_processes() as owner, ends_by_signal(lambda: end_processes_of(owner)):
        yield


def _end(error: Exception, command: str, context: RunContext | None) -> int:
    # A ValueError from another library is a failure, not a user error.
    is_users_error = isinstance(error, ConfigError) or (
        isinstance(error, ValueError) and _raised_by_megarl(error)
    )
    # Before the first step, one line is enough; later the failure report shows where the run failed.
    if is_users_error and (context is None or not context.is_under_way):
        print(f"megarl {command}: {error}", file=sys.stderr)
        return USER_ERROR

    importlib.import_module("megarl.cli.run.failure_report").print_failure(error, command, context)
    print(f"megarl {command}: failed at run time; the cause is shown above", file=sys.stderr)
    return USER_ERROR if is_users_error else FAILED


def _raised_by_megarl(error: ValueError) -> bool:
    """Whether megarl's code raised the error, which it does only for user errors.

    A ValueError from a library or a worker is a failure.
    """
    trace = error.__traceback__
    # The innermost frame is the one that raised the error.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""

    return module.split(".")[0] == "megarl"


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, by the command's name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return commands.choices


def in_argparse_order(arguments: Sequence[str], commands: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    """Reorder the arguments of a command: options, then positional arguments, then overrides.

    argparse accepts optional positional arguments only as one block, but users put them anywhere.
    `--key.sub=value` and `--key.sub value` are overrides too.
    """
    # Other commands keep argparse's own order.
    command = commands.get(arguments[0]) if arguments else None
    if command is None:
        return list(arguments)
    positional = [action for action in command._actions if not action.option_strings]
    has_overrides = any(action.dest == "overrides" for action in positional)
    keeps_order = not has_overrides and all(action.nargs != "?" for action in positional)
    # An option that lacks its value must not take the next argument of the new order, such as CONFIG.
    if keeps_order or _takes_value(arguments[-1], command):
        return list(arguments)
    if has_overrides:
        own = {option for action in command._actions for option in action.option_strings}
        arguments = _with_plain_overrides(arguments, own)
    options: list[str] = []
    others: list[str] = []
    overrides: list[str] = []

    # The argument after an option that takes a value belongs to that option.
    for before, each in pairwise(arguments):
        is_option = each.startswith("-") or _takes_value(before, command)
        is_override = has_overrides and OVERRIDE.match(each)
        kind = options if is_option else overrides if is_override else others
        kind.append(each)

    return [arguments[0], *options, *others, *overrides]


def _takes_value(word: str, command: argparse.ArgumentParser) -> bool:
    """Whether a word is an option of a command, or its abbreviation, whose value is the next word."""
    options = {option: action for action in command._actions for option in action.option_strings}
    if word in options:
        return options[word].nargs != 0
    if not word.startswith("--") or word == "--" or "=" in word:
        return False
    return any(option.startswith(word) and action.nargs != 0 for option, action in options.items())


def _with_plain_overrides(arguments: Sequence[str], own: Collection[str]) -> list[str]:
    """Return the arguments with overrides in the form `key=value`, of whichever form they have.

    Args:
        own: The options of the command.
    """
    plain: list[str] = []
    rest = deque(arguments)
    while rest:
        word = rest.popleft()
        _, equals, value = word.partition("=")
        key = _overridden_key(word, own)
        if key is None:
            plain.append(word)
            continue
        if not equals:  # the next word is the value, unless it is a flag
            value = rest.popleft() if rest and not rest[0].startswith("--") else "true"
        plain.append(f"{key}={value}")
    return plain


def _overridden_key(word: str, own: Collection[str]) -> str | None:
    """Return the key of an override that is written as an option; None for other words.

    An argument of another framework gets a migration hint as an override.
    """
    name = word.partition("=")[0].removeprefix("--")
    if word.startswith("--") and f"--{name}" not in own:
        from megarl.config.migration import is_argument  # reads tables, which few command lines need

        key = name.replace("-", "_")
        if is_argument(key):
            return key
    return name if _OVERRIDE_AS_OPTION.match(word) else None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    *most, last = FIRST
    parser = argparse.ArgumentParser(
        prog="megarl",
        usage="megarl [-h] [--version] COMMAND ...",
        description="Reinforcement learning of large language models on Megatron-Core and Ray.\n"
        f"To begin, six commands are enough: {', '.join(most)} and {last}.\n\n{_list_of_commands()}",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    # The description lists the commands, because argparse has no groups of them.
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="megarl"
    )
    for name, command in COMMANDS.items():
        command.add_to(commands, name)

    return parser


def _list_of_commands() -> str:
    """Return the commands by group, with one line each."""
    width = max(map(len, COMMANDS)) + 2
    lines = []
    for group in GROUPS:
        lines.append(f"{group}:")
        lines += [
            f"    {name:{width}}{command.summary}"
            for name, command in COMMANDS.items()
            if command.group == group
        ]
    return "\n".join(lines)


# ---- commands that have another name now: their command lines are accepted, and what they are now is printed


def _sft(words: Sequence[str]) -> list[str]:
    for word in words:
        key, equals, kind = word.removeprefix("--").partition("=")
        if key == "kind" and equals and kind != "sft":
            raise ValueError(f"{word} is another kind of run; use `megarl train`")
    return ["train", "kind=sft", *words]


def _plan(words: Sequence[str]) -> list[str]:
    # The simulation was an option of the plan, and is a part of its own.
    return ["check", *words] if "--simulate" in words else ["check", "--plan", *words]


def _submit(words: Sequence[str]) -> list[str]:
    if _has(words, "--address"):
        return ["train", *_renamed(words, "--address", "--submit")]
    return ["train", "--submit", "auto", *words]


def _score(words: Sequence[str]) -> list[str]:
    """Put `--rows` before the second positional argument, the file of responses."""
    # The command had one option, without a value. Any other one is an override, whose value may come next.
    takes_value = [
        word.startswith("--") and "=" not in word and word != "--ground-truth" for word in ("", *words)
    ]
    places = [
        index
        for index, word in enumerate(words)
        if not word.startswith("-") and not OVERRIDE.match(word) and not takes_value[index]
    ]
    if len(places) < 2:
        raise ValueError("the configuration and the file of responses are required")
    return ["eval", *words[: places[1]], "--rows", *words[places[1] :]]


def _renamed(words: Sequence[str], old: str, new: str) -> list[str]:
    if not _has(words, old):
        raise ValueError(f"{old} is required, which is {new} now")
    return [new + word.removeprefix(old) if _has([word], old) else word for word in words]


def _has(words: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in words)


# Each former name has the words that replace it, after `megarl`, and a function that rewrites the words after
# it. The function raises ValueError if a required option is missing, or if the words contradict the name.
FORMER: Mapping[str, tuple[str, Callable[[Sequence[str]], list[str]]]] = {
    "sft": ("train", _sft),
    "plan": ("check --plan", _plan),
    "rehearse": ("check --dry-run", lambda words: ["check", "--dry-run", *words]),
    "calibrate": (
        "tune --calibrate FILE",
        lambda words: ["tune", *_renamed(words, "--output", "--calibrate")],
    ),
    "submit": ("train --submit URL", _submit),
    "plot": ("report --png", lambda words: ["report", "--png", *words]),
    "score": ("eval CONFIG --rows FILE", _score),
    "schema": ("config --schema", lambda words: ["config", "--schema", *words]),
}

# Former subcommands of `convert`, which work as before, and the options that stand for them.
_CONVERSIONS: Mapping[str, tuple[str, ...]] = {
    "hf-to-megatron": ("--to", "megatron"),
    "megatron-to-hf": ("--to", "hf"),
    "merge-adapter": (),
    "inspect": ("--inspect",),
    "verify": ("--verify",),
}


def _conversion(words: Sequence[str]) -> list[str]:
    name, *rest = words
    if name in ("inspect", "verify"):
        return ["convert", *rest, *_CONVERSIONS[name]]
    source, rest = _taken(rest, "--input")
    target, rest = _taken(rest, "--output")
    # Without it, `convert` would write the adapter instead of the merged model.
    if name == "merge-adapter":
        base, rest = _taken(rest, "--base")
        rest = ["--base", base, *rest]
    return ["convert", source, target, *_CONVERSIONS[name], *rest]


def _taken(words: Sequence[str], option: str) -> tuple[str, list[str]]:
    """Return the value of an option, which may be abbreviated, and the other words."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if len(name) <= len("--") or not option.startswith(name):
            continue
        if equals:
            return value, [*words[:index], *words[index + 1 :]]
        if index + 1 < len(words):
            return words[index + 1], [*words[:index], *words[index + 2 :]]
    raise ValueError(f"{option} is required")


def message(words: Sequence[str]) -> str:
    """Say what a former command is now."""
    name = words[0]
    now = "check --simulate" if name == "plan" and "--simulate" in words else FORMER[name][0]
    return f"`megarl {name}` is now `megarl {now}`"


def in_current_words(words: Sequence[str]) -> list[str]:
    """Return a command line with the current name and options of its command.

    Raises:
        ValueError: It is one of a former command, and lacks a required option or contradicts the command.
    """
    name, *rest = words
    if name == "convert" and rest and rest[0] in _CONVERSIONS:
        return ["convert", "--help"] if "--help" in rest or "-h" in rest else _conversion(rest)
    if name not in FORMER:
        return list(words)
    now, rewrite = FORMER[name]
    if any(word in ("-h", "--help") for word in rest):
        return [now.split()[0], "--help"]
    return rewrite(rest)
