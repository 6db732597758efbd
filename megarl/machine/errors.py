"""Self-explanatory errors, and the words of their messages.

The command line shows these messages without a traceback. This module uses only the standard library.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from enum import Enum


class ConfigError(ValueError):
    """A configuration or input cannot be used. The message lists all problems, one line each, with the fix.

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
    """An error with a hint for the user.

    Attributes:
        hint: Remedies, one line each. `{key}` or `{key, key}` in a line is replaced by these settings of the
            run, `{role.key}` by the setting in the section of the role that failed, and the name of a fact by
            its value (all are listed in `cli/run/failure_report.py`). A class has the hint of all its errors;
            an instance may have its own.
        role: The role that the error concerns; empty if only the failed call can tell.
    """

    hint: Sequence[str] = ()
    role: str = ""


class RunError(HintedError, RuntimeError):
    """A failure at run time. The message says what failed, where and why.

    Args:
        message: Shown without a traceback.
        hint: Replaces the hint of the class.
    """

    def __init__(self, message: str, *, hint: Sequence[str] | None = None) -> None:
        super().__init__(message)
        if hint is not None:
            self.hint = tuple(hint)


class NonFiniteUpdateError(RunError):
    """The loss or gradient is not finite, and the run is to return to its last snapshot."""


class ReplicaMismatchError(RunError):
    """The weights of a rank differ from their copies on other ranks. The message names the rank."""

    hint = (
        "a device or its memory computes wrongly: take the named node out of the cluster, and test it",
        "checkpoints that were saved before are intact if the comparison is frequent: "
        "{recovery.check_replicas_every}",
    )


class CheckpointError(RunError):
    """A checkpoint cannot be written or read.

    The message is one line with the problem, the file, the tensor and the fix.
    """

    hint = (
        "see above for the problem and the older complete checkpoints; none of them is used automatically",
        "resume from an older one: set {checkpoint.resume} in the same command, as checkpoint.resume=PATH",
        "`megarl convert A B --verify` compares the weights of two checkpoints",
    )


# The hint for files of a run that could not be written.
UNWRITTEN = (
    "fix the folder and run the same command: it resumes from the latest complete checkpoint",
    "or save elsewhere: {checkpoint.dir, trainer.output_dir}",
)


# What a user can change when the memory of an engine's device is full.
LESS_ENGINE_MEMORY = (
    "sequences at a time: {rollout.max_concurrency unless 1}; try half",
    "the engine's share of the device: {engine_share}; try 0.1 less, or more if its cache has no memory",
    "devices per replica: {rollout.tensor_parallel_size}; try more",
    "weights in transit: {resharding.bucket_mb}",
    "roles that share its devices: {placement.strategy unless stand_alone}",
)
ENGINE_ENDED = (
    "the engine's last output is above; if it ran out of memory:",
    *(f"  {line}" for line in LESS_ENGINE_MEMORY),
    "if it is intermittent, allow more restarts: {rollout.restart_limit, rollout.health_limit_s}",
)


class EngineDeadError(RunError):
    """The engine's processes ended, or make no progress.

    Start another engine, and send its requests in flight again.
    """

    hint = ENGINE_ENDED
    role = "rollout"


def hint_of(error: BaseException | None) -> Sequence[str]:
    """Return the hint of the error, or of the first one in its chain of causes that has a hint."""
    while error is not None:
        if isinstance(error, HintedError) and error.hint:
            return error.hint
        error = error.__cause__
    return ()


def one_line(error: BaseException) -> str:
    """Return a library's message as one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


# ---- words of messages

_LONGEST = 60  # characters of a text in a message
_short = reprlib.Repr(maxlevel=3, maxdict=4, maxlist=4, maxstring=_LONGEST, maxlong=40, maxother=_LONGEST)


def in_short(value: object) -> str:
    """Return a value from outside as a message contains it, without the middle of what is long."""
    return _short.repr(value)


def named(name: str) -> str:
    """Return a name from outside as a message contains it: as it is, unless it is long."""
    return name if len(name) <= _LONGEST else in_short(name)


def counted(number: int, name: str) -> str:
    """Return a number with its noun, such as `1 rank`, `2 ranks` and `1,000 micro-batches`."""
    plural = f"{name}es" if name.endswith(("s", "ch")) else f"{name}s"
    if name.endswith("ry"):
        plural = f"{name[:-1]}ies"
    return f"{number:,} {name if number == 1 else plural}"


def byte_unit(nbytes: float) -> tuple[int, str]:
    """Return the bytes and the name of the unit in which a size is readable: GiB, MiB or KiB."""
    units = ((2**30, "GiB"), (2**20, "MiB"))
    return next((unit for unit in units if nbytes >= unit[0]), (2**10, "KiB"))


def sized(nbytes: float, decimals: int = 1) -> str:
    """Return a size with its unit, such as `1.5 GiB`, `20.0 MiB` and `0.5 KiB`."""
    unit, name = byte_unit(nbytes)
    return f"{nbytes / unit:,.{decimals}f} {name}"


def written(value: object) -> str:
    """Return a value as a configuration file contains it, such as `true`, `null` and `[a, b]`."""
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {written(inner)}' for name, inner in value.items())}}}"
    if is_dataclass(value):
        return written({entry.name: getattr(value, entry.name) for entry in fields(value)})
    return str(value)
