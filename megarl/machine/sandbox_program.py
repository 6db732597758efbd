"""Runs one program inside a sandbox.

A process confines itself and runs the program; its parent process supervises it.

`megarl.machine.sandbox` starts it with an order. The process forks: the child confines itself and runs the
program; the parent limits the child's threads, ends it when the caller has gone, and reports to the caller
how it ended.

This module runs at the start of every sandboxed program, so it imports only modules that load quickly, which
excludes typing and collections.
"""

from __future__ import annotations

import _socket  # socket.socket without the module `socket`, which takes 5 ms to load
import builtins
import ctypes
import marshal
import os
import resource
import sys

from megarl.machine.confined import (
    SIGKILL,
    ConfinementError,
    ProcessLimits,
    close_descriptors_from,
    confine,
    end_with,
    limit,
)
from megarl.machine.supervisor import send_descriptors, send_thread_calls, supervise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn

NAME = "<program>"  # file name of the program in tracebacks
# Messages to the caller.
PROCESSES = b"processes"
BEGUN = b"begun"
ENDED = b"ended "
_TEMPORARY_FILES = 1024  # each uses kernel memory that no other limit counts
_SUPERVISION_CPU_S = 10
_NOSUID_NODEV = 2 | 4


def run(descriptor: int) -> None:
    """Run the order in the file `descriptor` (see sandbox_levels.order_for).

    This returns in the child process, after the program has ended.
    """
    with open(descriptor, "rb") as file:
        order = marshal.load(file)
    channel = _socket.socket(fileno=order["channel"])
    end_with(os.getppid())
    # Mount the folder while this process still has the capability.
    if order["temporary_mb"]:
        _make_temporary_folder(order["temporary_mb"])

    # Fork into the supervisor and the process of the program.
    to_child, to_supervisor = _socket.socketpair()
    supervisor = os.getpid()
    child = os.fork()

    if child:
        to_supervisor.close()
        _supervise(child, order, channel, to_child)

    end_with(supervisor)
    to_child.close()

    try:
        _confine_program(order, channel, to_supervisor, supervisor)
    except ConfinementError as failure:
        sys.exit(str(failure))

    # The limit protects servers from long texts; a program has its limit of CPU time.
    sys.set_int_max_str_digits(0)
    # Run the program, hiding the code that started it. `exit` and `quit` come from the module site, which -S
    # skips.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    os.environ.clear()
    sys.path_importer_cache.pop(sys.path.pop(0), None)
    sys.excepthook = _ExceptionPrinter(order["program"])
    exec(compile(order["program"], NAME, "exec", dont_inherit=True), {"__name__": "__main__"})


def _confine_program(
    order: dict, channel: _socket.socket, to_supervisor: _socket.socket, supervisor: int
) -> None:
    """Confine this process, and notify the caller when this is done."""
    # The caller waits on these descriptors, which do not depend on the pid namespace.
    processes = [os.getpid(), supervisor, *([1] if order["has_own_init"] else [])]
    send_descriptors(channel, PROCESSES, [os.pidfd_open(process) for process in processes])

    if order["is_confined"]:
        send_thread_calls(to_supervisor)
        confine(ProcessLimits(*order["limits"]), order["readable"], order["writable"])
    else:
        limit(ProcessLimits(*order["limits"]))

    channel.send(BEGUN)
    channel.close()
    to_supervisor.close()
    # The program must not inherit a descriptor that leads out of the sandbox.
    close_descriptors_from(3)


def _supervise(child: int, order: dict, channel: _socket.socket, to_child: _socket.socket) -> NoReturn:
    # The program's streams must close with the program. The supervisor's CPU time is limited too.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    limits = ProcessLimits(*order["limits"])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s + _SUPERVISION_CPU_S, hard))

    def end_without_caller() -> bool:
        os.kill(child, SIGKILL)
        return False

    status = supervise(child, limits.threads, to_child, {channel.fileno(): end_without_caller})
    try:
        channel.send(ENDED + b"%d" % os.waitstatus_to_exitcode(status))
    except OSError:
        os._exit(1)  # the caller has gone

    os._exit(0)


def _make_temporary_folder(megabytes: int) -> None:
    """Mount a /tmp with a limited number of files, and drop the capability to do so.

    bubblewrap does not support such a limit.
    """
    options = f"size={megabytes}m,nr_inodes={_TEMPORARY_FILES},mode=700".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", _NOSUID_NODEV, options) < 0:
        sys.exit(f"/tmp cannot be mounted: {os.strerror(ctypes.get_errno())}")
    os.chdir("/tmp")


class _ExceptionPrinter:
    """An excepthook that shows the lines of the program, without those of this module."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import linecache  # imported here, because these take as long to load as everything else together
        import traceback

        linecache.cache[NAME] = (len(self._program), None, self._program.splitlines(keepends=True), NAME)
        while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)
