"""The parser of the command line, made from the table of commands."""

from __future__ import annotations

import argparse

from megarl import __version__
from megarl.cli.commands import COMMANDS

_EXAMPLES = """examples:
  megarl quickstart                                        train a tiny model in minutes on two cores
  megarl init my_run --model MODEL_DIR --data rows.jsonl   create the files of your own run
  megarl check my_run/run.yaml                             report all configuration errors
  megarl train my_run/run.yaml                             train; the same command resumes
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="megarl",
        description="Reinforcement learning of large language models on Megatron-Core and Ray.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_to(commands, name)

    return parser
