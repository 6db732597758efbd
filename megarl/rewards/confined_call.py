"""Calls a reward function on one sample in a process of its own, which can read, change and reach nothing that matters, and ends with the
call: a sample sees nothing of another, and changes nothing for those after it.

The process is forked from the one that has loaded the function, so that a call costs a few milliseconds and no import.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from megarl.machine.confined import ProcessLimits, confine
from megarl.machine.sandbox import READABLE, WRITABLE
from megarl.machine.user_functions import last_line

_MOST_BYTES = 65536  # of what a call answers


class ConfinedCallError(ValueError):
    """What is wrong with a call, in words that follow the function's name."""


def call_confined(call: Callable[[], Any], limits: ProcessLimits) -> Any:
    """What `call` returns, which must be JSON. Raises ConfinedCallError where it raises, or its process dies."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(call, limits, write)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read(_MOST_BYTES + 1)
    if len(answer) > _MOST_BYTES:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    try:
        kind, value = json.loads(answer)
    except (ValueError, TypeError, RecursionError):  # nothing, or cut off, or what the sample's own program wrote
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        raise ConfinedCallError(f"ended its process ({ended}) without an answer") from None
    if kind == "error":
        raise ConfinedCallError(str(value))
    return value


def _answer(call: Callable[[], Any], limits: ProcessLimits, write: int) -> NoReturn:
    """In the child: it never returns to what the parent was at."""
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nowhere, stream)
        os.closerange(3, write)
        os.closerange(write + 1, os.sysconf("SC_OPEN_MAX"))
        confine(limits, READABLE, WRITABLE)
        said = json.dumps(("value", call()))
    except ConfinedCallError as error:
        said = json.dumps(("error", str(error)))
    except BaseException as error:  # noqa: BLE001  (the boundary of the process: the user's code may raise anything, SystemExit too)
        said = json.dumps(("error", f"raised {last_line(error)}"))
    with contextlib.suppress(OSError):  # the parent has closed its end: more was said than it reads
        os.write(write, said.encode())
    os._exit(0)
