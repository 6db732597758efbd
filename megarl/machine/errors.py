"""The errors that explain themselves: the command line shows their message without a stack."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.machine.wording import counted


class ConfigError(ValueError):
    """What a user wrote cannot be run. Every problem found in one place, one line each, that says what to change.

    `source` is the file (or files) that the user would edit.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{source}: {counted(len(problems), 'problem')}", *(f"  - {problem}" for problem in problems)]))


class RunError(RuntimeError):
    """Something failed while running, and the message says what, where and why."""


class CheckpointError(RunError):
    """A checkpoint cannot be written or read. One line: what is wrong, in which file, with which tensor, and what to do."""


def one_line(error: BaseException) -> str:
    """Of a library's message, at most 200 characters of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
