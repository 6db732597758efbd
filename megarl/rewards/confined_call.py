"""Calls a reward function on one sample in a process of its own, which can read, change and reach nothing that matters, and ends with the
call: a sample sees nothing of another, and changes nothing for those after it.

The process is forked from the one that has loaded the function, so that a call costs a few milliseconds and no import.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from megarl.machine.confined import ProcessLimits, confine
from megarl.machine.sandbox import READABLE, WRITABLE
from megarl.machine.user_functions import last_line

_MOST_BYTES = 65536  # of what a call answers
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")


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
    except ValueError:  # nothing, or cut off, or what the sample's own program wrote
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


def forget_environment(named: Collection[str], marks: Collection[str]) -> None:
    """Leaves this process the variables `named`, `marks` and a few that say where and in which language it runs. Of the others nothing is
    left in its memory either, where a program could look for them."""
    # Asked for one by one: to go through all would make a text of each.
    kept = {name: os.environ[name] for name in (*_KEPT, *named, *marks) if name in os.environ}
    for entry in vars(os.environ)["_data"].items():
        for text in entry:
            if len(text) > 1:  # CPython shares those of one byte
                ctypes.memset(id(text) + bytes.__basicsize__ - 1, 0, len(text))
    _clear_first_environment(set(kept))
    vars(os.environ)["_data"].clear()
    ctypes.CDLL(None).clearenv()
    os.environ.update(kept)


def _clear_first_environment(kept: Collection[str]) -> None:
    """What the kernel gave the process when it began, and shows in /proc/PID/environ."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # env_start, env_end of proc(5)
    place = begin
    for text in ctypes.string_at(begin, end - begin).split(b"\0"):
        if text.partition(b"=")[0].decode(errors="replace") not in kept:
            ctypes.memset(place, 0, len(text))
        place += len(text) + 1
