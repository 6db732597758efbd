"""The errors that explain themselves: the command line shows their message without a stack."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.machine.wording import counted


class ConfigError(ValueError):
    """What a user wrote cannot be run. Every problem found in one place, one line each, that says what to
    change.

    `source` is the file (or files) that the user would edit.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(
            "\n".join(
                [
                    f"{source}: {counted(len(problems), 'problem')}",
                    *(f"  - {problem}" for problem in problems),
                ]
            )
        )


class HintedError(Exception):
    """An error that knows what helps against it.

    Attributes:
        hint: What to try, one line each. `{key}` or `{key, key}` in a line is replaced by these settings of
            the run, `{role.key}` by the setting in the section of the role that failed, and the name of a
            fact by its value (`cli/run/hints.py` has them all). A class has the hint of all its errors; an
            instance may have its own.
        role: The role that the error is about, empty if only a failed call can tell.
    """

    hint: Sequence[str] = ()
    role: str = ""


class RunError(HintedError, RuntimeError):
    """Something failed while running, and the message says what, where and why.

    Args:
        message: What is shown without a traceback.
        hint: What to try, where it is not the hint of the class.
    """

    def __init__(self, message: str, *, hint: Sequence[str] | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = tuple(hint)


class CheckpointError(RunError):
    """A checkpoint cannot be written or read. One line: what is wrong, in which file, with which tensor, and
    what to do."""

    hint = (
        "see above for what is wrong and which older checkpoints are complete; none of them is used "
        "automatically",
        "resume from an older one: the same command with checkpoint.resume=PATH (now {checkpoint.resume})",
        "`megarl convert verify` compares a checkpoint's weights with another's",
    )


# The hint where files of a run could not be written.
UNWRITTEN = (
    "fix the folder and run the same command: it resumes from the latest complete checkpoint",
    "or save elsewhere: {checkpoint.dir, trainer.output_dir}",
)


def hint_of(error: BaseException | None) -> Sequence[str]:
    """Return the hint of the error, or of the first that has one among those it was raised from."""
    while error is not None:
        if isinstance(error, HintedError) and error.hint:
            return error.hint
        error = error.__cause__
    return ()


def one_line(error: BaseException) -> str:
    """Of a library's message, at most 200 characters of it."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."
