"""Calls a reward function for one sample in a separate, confined process.

The process ends with the call, so that samples cannot see or affect each other.

The process is forked from the one that has loaded the function, so a call costs a few milliseconds and no
imports.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
from collections.abc import Callable, Iterable
from numbers import Real
from typing import Any, NoReturn

from megarl.machine.confined import ProcessLimits, close_descriptors_from, confine, end_with
from megarl.machine.sandbox_levels import WRITABLE, readable_by_functions
from megarl.machine.supervisor import send_thread_calls, supervise
from megarl.machine.user_functions import last_line

_MOST_BYTES = 65536  # of the answer of a call


class ConfinedCallError(ValueError):
    """A call failed. The message follows the function's name."""


def call_confined(call: Callable[[], Any], limits: ProcessLimits) -> Any:
    """Return the result of `call`, which must be JSON. No process that it starts outlives the call.

    Raises:
        ConfinedCallError: `call` raises, its process dies, or its result is not JSON.
    """
    readable = readable_by_functions()
    read, write = os.pipe()
    to_child, to_supervisor = socket.socketpair()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _answer(call, limits, readable, write, to_supervisor, parent)
    # Close the child's ends here, or the end of the answer would never be detected.
    os.close(write)
    to_supervisor.close()
    answer = bytearray()

    def take() -> bool:
        """Read some of the answer. A process that writes too much is killed."""
        chunk = os.read(read, _MOST_BYTES)
        answer.extend(chunk)

        if len(answer) > _MOST_BYTES:
            os.kill(child, signal.SIGKILL)
            return False

        return bool(chunk)

    try:
        status = supervise(child, limits.threads, to_child, {read: take})
        while len(answer) <= _MOST_BYTES and take():  # read the rest of the pipe
            pass
    finally:
        os.close(read)

    return _checked(bytes(answer), status)


def _checked(answer: bytes, status: int) -> Any:
    try:
        kind, value = json.loads(answer)
    except (
        ValueError,
        TypeError,
        RecursionError,
    ):  # nothing, or truncated, or written by a program of the model
        ended = (
            f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        )
        raise ConfinedCallError(f"ended its process ({ended}) without an answer") from None

    if kind == "error":
        raise ConfinedCallError(str(value))
    return value


def _answer(
    call: Callable[[], Any],
    limits: ProcessLimits,
    readable: Iterable[str],
    write: int,
    to_supervisor: socket.socket,
    parent: int,
) -> NoReturn:
    """Make the call in the child process, and end the process."""
    try:
        end_with(parent)
        # The function's output must not mix with the answer.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        send_thread_calls(to_supervisor)
        to_supervisor.close()
        # Keep the answer's pipe as descriptor 3, and close all other inherited descriptors.
        os.dup2(write, 3)
        close_descriptors_from(4)
        confine(limits, readable, WRITABLE)
        said = json.dumps(("value", call()))
    except ConfinedCallError as error:
        said = json.dumps(("error", str(error)))
    except BaseException as error:  # noqa: BLE001
        # This is the boundary of the process: the user's code may raise anything, even SystemExit.
        said = json.dumps(("error", f"raised {last_line(error)}"))

    with contextlib.suppress(OSError):  # the parent closes its end if the answer is too long
        os.write(3, said.encode())
    os._exit(0)


# ---- the numbers that reward functions and the parsers of judges return


class NotAScoreError(ConfinedCallError):
    """A function returned something other than a finite number, or a dict with such a `score`."""


def finite_number(value: Any) -> float | None:
    """Return a finite float, or None. numpy and torch scalars count as numbers."""
    if getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, Real):
        return None

    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None

    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """Return the beginning of the value's text.

    Python does not print integers with more than a few thousand digits.
    """
    if isinstance(value, int) and value.bit_length() > 1000:
        return f"of {value.bit_length()} bits"
    return repr(value)[:60]


# ---- the time limit for scoring one sample in this process, for functions that enforce it themselves


# The default of reward.time_limit_s, for functions that are called outside of a reward process.
_limit_s = 10.0


def set_sample_limit(seconds: float) -> None:
    global _limit_s
    _limit_s = seconds


def sample_limit_s() -> float:
    """Return the run's `reward.time_limit_s`."""
    return _limit_s
