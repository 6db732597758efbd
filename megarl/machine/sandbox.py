"""Runs programs that a model wrote in a process that can do no harm: without network and other processes,
with a few readable files, and with limits of time, memory and output.

What that process gives up by itself is in megarl/machine/confined.py. Where the machine allows it, the
process also gets its own namespaces, from bubblewrap, which shows it a file system of its own with a `/tmp`
to write to, or from `unshare`. A level is used where a trial shows that it works: a container may forbid
namespaces, and a kernel may have no Landlock.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Literal, NamedTuple

import megarl
from megarl.machine import readable_files
from megarl.machine.reaper import OWNER
from megarl.machine.sandbox_program import BEGUN, ENDED, PROCESSES, Order

START_LIMIT_S = 60.0  # until a program begins, on a busy machine; its own time counts from there
_END_LIMIT_S = 10.0  # after which the kernel is asked to end what should end by itself
_MAX_THREADS = 128
WRITABLE = ("/dev/null",)
_PACKAGE = Path(megarl.__file__).absolute().parent
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types")
# Folders in which bubblewrap's processes start Python. The program itself may read what readable_files names.
_PYTHONS = tuple(
    sorted(
        {
            sys.prefix,
            sys.base_prefix,
            *map(os.path.realpath, (sys.base_prefix, os.__file__ + "/..", sys.executable + "/..")),
        }
    )
)
_SHOWN = (*_SYSTEM, *_PYTHONS, str(_PACKAGE / "__init__.py"), str(_PACKAGE / "machine"))


class Level(str, Enum):
    """From the strongest to the weakest; the last is none, and never chosen unless by name."""

    bubblewrap = "bubblewrap"  # namespaces and a file system of its own, by `bwrap`
    namespaces = "namespaces"  # of processes, network and mounts, by `unshare`; files by Landlock
    landlock = "landlock"  # files by Landlock, all else by seccomp: nothing has to be installed or allowed
    process = "process"  # limits of memory and time only


class SandboxError(RuntimeError):
    """No sandbox works on this machine, or the level that was asked for does not; the message says why, and
    what to change."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """memory_mb: of address space. cpu_s, wall_s: seconds of the processor and of the clock. output_kb: of
    what it prints, on both streams together. disk_mb: of what it writes to /tmp, where it has one."""

    memory_mb: int = 512
    cpu_s: int = 10
    wall_s: float = 15.0
    output_kb: int = 64
    disk_mb: int = 16


class Finished(NamedTuple):
    """What a program did. ended: by itself, or by which limit it was. status: as of a subprocess; below 0 the
    signal's number."""

    output: str
    errors: str
    status: int
    ended: Literal["itself", "time", "output"]


def run_program(program: str, level: Level, limits: SandboxLimits, stdin: str = "") -> Finished:
    """Run the text of a Python program with the standard library and an empty environment.

    None of its processes and files is left when this returns, or raises.

    Raises:
        SandboxError: `level` does not work on this machine.
    """
    with _sealed_file("stdin", stdin.encode()) as given:
        started = StartedProgram(program, level, limits, given.fileno())
        try:
            said = started.read()
        finally:
            status = started.end()
    return started.finished(said, status)


def _sealed_file(name: str, content: bytes) -> IO[bytes]:
    """A file in memory at its beginning, which nobody can change: as one that is written to, it would be
    memory without a limit."""
    # The caller closes it.
    file = open(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")  # noqa: SIM115
    file.write(content)
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)

    return file


def _order(program: str, level: Level, limits: SandboxLimits, channel: int) -> Order:
    has_own_files = level is Level.bubblewrap
    return Order(
        program=program,
        limits=(limits.memory_mb, limits.cpu_s, limits.disk_mb, _MAX_THREADS),
        readable=readable_files.for_programs(),
        writable=(*WRITABLE, "/tmp") if has_own_files else WRITABLE,
        is_confined=level is not Level.process,
        has_own_init=level in (Level.bubblewrap, Level.namespaces),
        temporary_mb=limits.disk_mb if has_own_files else 0,
        channel=channel,
    )


def _command(level: Level, order: int) -> list[str]:
    start = (
        f"import sys; sys.path.insert(0, {str(_PACKAGE.parent)!r}); from megarl.machine.sandbox_program "
        f"import run; run({order})"
    )
    python = [readable_files.PYTHON, "-I", "-S", "-B", "-c", start]
    if level not in (Level.bubblewrap, Level.namespaces):
        return python

    # of the outermost process: the innermost says it for itself
    around = [_tool("setpriv", level), "--pdeathsig", "KILL"]
    if level is Level.namespaces:
        around += [
            _tool("unshare", level),
            "--fork",
            "--kill-child",
            "--pid",
            "--net",
            "--ipc",
            "--uts",
            "--mount",
            "--mount-proc",
        ]
        around += [] if os.geteuid() == 0 else ["--map-root-user"]
    else:
        around += [_tool("bwrap", level), "--unshare-all", "--die-with-parent", "--new-session"]
        # which the order's process gives up once it has a /tmp
        around += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
        around += ["--proc", "/proc", "--dir", "/tmp"]
        # Not `--dev`: for users other than root it adds a user namespace in which that capability does not
        # cover the mounts.
        for path in readable_files.DEVICES:
            around += ["--dev-bind", path, path]
        for path in _SHOWN:
            around += ["--ro-bind-try", path, path]

    return [*around, *python]


def _tool(name: str, level: Level) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"the sandbox {level.value} needs {name!r}, which is not installed")
    return path


class Said(NamedTuple):
    """What has been read of a program's streams, and what ended the reading."""

    output: bytes
    errors: bytes
    ended: Literal["itself", "time", "output"]


class StartedProgram:
    """A program in the sandbox, whose output is read while it runs. Call `end` in any case.

    The kernel ends it with the thread that made this.

    Args:
        stdin: A descriptor, or subprocess.PIPE.
    """

    def __init__(self, program: str, level: Level, limits: SandboxLimits, stdin: int) -> None:
        self._level = level
        self._limits = limits
        self._has_begun = False
        self._status: int | None = None

        # descriptors of the sandbox's processes: the program's, and those that are above it in the sandbox
        self._held: list[int] = []
        self._ending = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        # by which the reaper knows the processes
        owner = {OWNER: os.environ[OWNER]} if OWNER in os.environ else {}
        try:
            with (
                theirs,
                _sealed_file("order", _order(program, level, limits, theirs.fileno()).encode()) as order,
            ):
                self.process = subprocess.Popen(
                    _command(level, order.fileno()),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[order.fileno(), theirs.fileno()],
                    env=owner,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise

    def read(self, given: bytes = b"", until: bytes | None = None) -> Said:
        """Read until `until` was printed, the program has ended, too much was printed, or the time is over.

        The time counts from here, or from when the program begins.

        Args:
            given: What is written to its standard input meanwhile.
        """
        process = self.process
        limits = self._limits
        assert process.stdout is not None
        assert process.stderr is not None
        room = limits.output_kb * 1024
        output = bytearray()
        errors = bytearray()
        deadline = time.monotonic() + (limits.wall_s if self._has_begun else START_LIMIT_S)
        ended: Literal["itself", "time", "output"] = "itself"

        with selectors.DefaultSelector() as streams:
            streams.register(process.stdout, selectors.EVENT_READ, output)
            streams.register(process.stderr, selectors.EVENT_READ, errors)
            streams.register(self._channel, selectors.EVENT_READ)
            # A write that blocks while the program waits for its output to be read would deadlock.
            if given:
                assert process.stdin is not None
                os.set_blocking(process.stdin.fileno(), False)
                streams.register(process.stdin, selectors.EVENT_WRITE)
            while streams.get_map() and ended == "itself":
                is_enough = until is not None and until in output
                ready = streams.select(0 if is_enough else max(0.0, deadline - time.monotonic()))
                if is_enough and not ready:  # nor is there anything more on the other stream
                    break
                for key, _ in ready:
                    if key.fileobj is self._channel:
                        message = self._receive()
                        if message == BEGUN:
                            deadline = time.monotonic() + limits.wall_s
                        elif not message:
                            streams.unregister(key.fileobj)
                    elif key.fileobj is process.stdin:
                        given = given[_written(key.fd, given) :]
                        if not given:
                            streams.unregister(key.fileobj)
                    elif chunk := os.read(key.fd, 65536):
                        key.data.extend(chunk)
                    else:
                        streams.unregister(key.fileobj)
                # The limit is checked after each round, so one pass over the streams may exceed it.
                if len(output) + len(errors) > room + len(until or b""):
                    ended = "output"
                elif time.monotonic() >= deadline and streams.get_map():
                    ended = "time"

        return Said(bytes(output), bytes(errors), ended)

    def _receive(self) -> bytes:
        """Take one message from the sandbox; empty where all who could send one have ended."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, 64, 3)
        if message == PROCESSES:
            self._held = descriptors
        elif message == BEGUN:
            self._has_begun = True
        elif message.startswith(ENDED):
            self._status = int(message.removeprefix(ENDED))

        return message

    def kill(self) -> None:
        """End the program. Any thread may call this. What is above the program in the sandbox then ends by
        itself."""
        with self._ending:
            if self._held:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._held[0], signal.SIGKILL)
            elif self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """End the program where it runs, wait until none of the sandbox's processes is left, and return the
        program's status."""
        self.kill()
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

        # Messages that were not yet read may hold the process descriptors and the status.
        with contextlib.suppress(OSError):
            self._channel.setblocking(False)
            while self._receive():
                pass

        with self._ending:
            for descriptor in self._held:
                _end_held(descriptor)
            self._held = []

        for stream in (self.process.stdin, self.process.stdout, self.process.stderr, self._channel):
            if stream is not None:
                stream.close()

        return self.process.returncode if self._status is None else self._status

    def finished(self, said: Said, status: int) -> Finished:
        """Raises SandboxError where the program did not begin."""
        room = self._limits.output_kb * 1024
        output, errors = (stream[:room].decode(errors="replace") for stream in (said.output, said.errors))
        finished = Finished(output, errors, status, said.ended)

        if not self._has_begun:
            raise SandboxError(
                f"the sandbox {self._level.value} does not work here: {' '.join(errors.split()) or finished}"
            )

        return finished


def _end_held(descriptor: int) -> None:
    """Wait until the process of a process descriptor has ended, killing it where it does not do so by itself;
    then close it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)

    if not poll.poll(_END_LIMIT_S * 1000):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll.poll()

    os.close(descriptor)


def _written(descriptor: int, data: bytes) -> int:
    """How much of it; all where nobody reads any more, which the end of the other streams tells."""
    try:
        return os.write(descriptor, data)
    except BrokenPipeError:
        return len(data)


# ---- which level a machine has

_PROBE = """
import os, socket
attempts = {{
    "read a file": lambda: open({canary!r}).read(), "open a socket": socket.socket, "start a process": os.fork
}}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    print("a program could", name)
"""


@functools.cache
def why_not(level: Level) -> str:
    """Why it is not used here, in one line; empty where a program was seen not to get out of it."""
    with tempfile.NamedTemporaryFile("w", suffix=".canary") as canary:
        os.chmod(canary.name, 0o644)
        try:
            finished = run_program(_PROBE.format(canary=canary.name), level, SandboxLimits())
        except SandboxError as error:
            return str(error)

    # The probe prints each way out that it finds, so silence and status 0 mean that the level holds.
    got_out = (
        finished.output or finished.errors or ("" if finished.status == 0 else f"status {finished.status}")
    )
    return f"the sandbox {level.value} does not hold here: {' '.join(got_out.split())}" if got_out else ""


def strongest() -> Level:
    """Raises SandboxError where none holds."""
    reasons = []
    # The last level is a bare process, which holds nothing back.
    for level in list(Level)[:-1]:
        if not (reason := why_not(level)):
            return level
        reasons.append(reason)

    raise SandboxError(
        f"no sandbox works on this machine: {'; '.join(reasons)}. Install bubblewrap, or allow namespaces "
        f"or Landlock"
    )
