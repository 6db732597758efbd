"""Calls a reward function on one sample in a process of its own, which can read, change and reach nothing
that matters, and ends with the
call: a sample sees nothing of another, and changes nothing for those after it.

The process is forked from the one that has loaded the function, so that a call costs a few milliseconds and
no import.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from megarl.machine import readable_files
from megarl.machine.confined import ProcessLimits, close_descriptors_from, confine, end_with
from megarl.machine.sandbox_levels import WRITABLE
from megarl.machine.sandbox_program import send_thread_calls
from megarl.machine.supervisor import supervise
from megarl.machine.user_functions import last_line

_MOST_BYTES = 65536  # of what a call answers


class ConfinedCallError(ValueError):
    """What is wrong with a call, in words that follow the function's name."""


def call_confined(call: Callable[[], Any], limits: ProcessLimits) -> Any:
    """Return what `call` returns, which must be JSON. None of its processes is left, whatever it does.

    Raises:
        ConfinedCallError: `call` raises, its process dies, or what it answers is not JSON.
    """
    readable = readable_files.for_functions()
    read, write = os.pipe()
    to_child, to_supervisor = socket.socketpair()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _answer(call, limits, readable, write, to_supervisor, parent)
    # Close the child's ends here, or the end of its answer would never be seen.
    os.close(write)
    to_supervisor.close()
    answer = bytearray()

    def take() -> bool:
        """Take some of the answer. A process that says too much is killed."""
        chunk = os.read(read, _MOST_BYTES)
        answer.extend(chunk)

        if len(answer) > _MOST_BYTES:
            os.kill(child, signal.SIGKILL)
            return False

        return bool(chunk)

    try:
        status = supervise(child, limits.threads, to_child, {read: take})
        while len(answer) <= _MOST_BYTES and take():  # what was still in the pipe
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
    ):  # nothing, or cut off, or what the sample's own program wrote
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
    """Make the call in the child process, which ends with it."""
    try:
        end_with(parent)
        # What the function prints must not mix with the answer.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        send_thread_calls(to_supervisor)
        to_supervisor.close()
        # Keep the answer's pipe as descriptor 3, and close all else that the child inherited.
        os.dup2(write, 3)
        close_descriptors_from(4)
        confine(limits, readable, WRITABLE)
        said = json.dumps(("value", call()))
    except ConfinedCallError as error:
        said = json.dumps(("error", str(error)))
    except BaseException as error:  # noqa: BLE001
        # The boundary of the process: the user's code may raise anything, SystemExit too.
        said = json.dumps(("error", f"raised {last_line(error)}"))

    with contextlib.suppress(OSError):  # the parent has closed its end: more was said than it reads
        os.write(3, said.encode())
    os._exit(0)
