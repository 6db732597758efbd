"""Runs one order in the namespaces of another process, such as the first one of a sandbox.

megarl/agents/sandboxes/protocol.py starts it in a process that joins the namespaces and drops its privileges
before it reads anything of the sandbox. Paths are therefore those of the sandbox, and its links cannot lead
out of it.

This module runs for every command in a sandbox, so it imports only modules that load quickly.

Sources: setns(2), capabilities(7), prctl(2), seccomp(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import stat
import sys
import warnings  # noqa: F401  (os.execvpe imports it, when nothing can be imported any more)

from megarl.machine.confined import close_descriptors_from, drop_capabilities, end_with
from megarl.machine.system_calls import refuse_dangerous_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

_INSIDE = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_LAST_CAPABILITY = 63  # a kernel refuses those that it does not know
_CANNOT_START = 127  # as a shell
_BLOCK = 1 << 20


def run(pidfd: int, descriptor: int) -> NoReturn:
    """Run the order in the file `descriptor`, and end with its status."""
    with open(descriptor, "rb") as file:
        order, arguments = json.load(file)
    try:
        status = ORDERS[order](pidfd, **arguments)
    except (OSError, ValueError) as error:
        status = f"{type(error).__name__}: {error}"
    sys.exit(status)


def listen(pidfd: int, channel: int) -> int:
    """Listen on a port of the loopback address in the network of the process, and send the socket."""
    import socket

    _join(pidfd, os.CLONE_NEWNET)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=128) as listening,
        socket.socket(fileno=channel) as to,
    ):
        socket.send_fds(to, [b"listening"], [listening.fileno()])
    return 0


def execute(
    pidfd: int, command: Sequence[str], environment: Mapping[str, str], folder: str, max_processes: int
) -> int:
    """Run a command, and return its status; 128 and the signal's number if one has ended it.

    It has its own session. This process kills its process group on SIGTERM.
    """
    _join(pidfd, _INSIDE)
    child = os.fork()  # a new process namespace is that of children
    if not child:
        end_with(0)  # the number of a parent outside of the process namespace
        os.setsid()
        os.umask(0o022)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)
        most = max_processes if most == resource.RLIM_INFINITY else min(most, max_processes)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        close_descriptors_from(3)
        _drop_privileges()
        try:
            os.execvpe(command[0], list(command), dict(environment))
        except OSError as error:
            os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
            os._exit(_CANNOT_START)

    def end(*_: object) -> None:
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def unpack(pidfd: int, folder: str) -> int:
    """Extract the tar archive on standard input."""
    import tarfile  # imported here, because it takes as long to load as everything else together

    _join(pidfd, _INSIDE & ~os.CLONE_NEWPID)
    _drop_privileges()
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        # The archive is that of the run, and its paths are those of the sandbox.
        archive.extractall(folder, filter="fully_trusted")
    return 0


def read(pidfd: int, path: str, max_bytes: int) -> int:
    """Write a file to standard output, at most one byte more than `max_bytes`."""
    _join(pidfd, _INSIDE & ~os.CLONE_NEWPID)
    _drop_privileges()
    # A pipe would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise ValueError(f"{path} is not a file")
    left = max_bytes + 1
    while left > 0 and (block := os.read(descriptor, min(left, _BLOCK))):
        left -= sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    return 0


def _join(pidfd: int, kinds: int) -> None:
    """Join namespaces of a process. Only the owner of a user namespace, or root, can join one.

    Nothing can be imported afterwards, because it would be read from the file system of the sandbox.
    """
    sys.path.clear()
    if os.stat(f"/proc/{_pid_of(pidfd)}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino:
        kinds |= os.CLONE_NEWUSER
    os.setns(pidfd, kinds)


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def _drop_privileges() -> None:
    """Drop all capabilities and dangerous calls for good, also for programs that the process starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    drop_capabilities()
    refuse_dangerous_calls()


ORDERS = {"listen": listen, "execute": execute, "unpack": unpack, "read": read}
