"""Runs programs written by a model in a sandbox.

The sandbox has no network or other processes, few readable files, and limits on time, memory and output.

megarl/machine/confined.py restricts the process itself. If the machine allows it, the process also gets its
own namespaces: from bubblewrap, which provides a separate file system with a writable `/tmp`, or from
`unshare`. A level is used only if a trial shows that it works, because a container may forbid namespaces, and
a kernel may not have Landlock.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
from typing import IO, Literal, NamedTuple

from megarl.machine.reaper import OWNER, has_ended
from megarl.machine.sandbox_levels import Level, SandboxError, SandboxLimits, command_for, order_for
from megarl.machine.sandbox_program import BEGUN, ENDED, PROCESSES

START_LIMIT_S = 60.0  # for a program to start, on a busy machine; its own time limit begins then
_END_LIMIT_S = 10.0  # after which processes that should end by themselves are killed


class Finished(NamedTuple):
    """The result of a program.

    Attributes:
        status: As for a subprocess; the negative number of the signal if it was killed.
        ended: Whether it ended by itself, or which limit it exceeded.
    """

    output: str
    errors: str
    status: int
    ended: Literal["itself", "time", "output"]


def run_program(program: str, level: Level, limits: SandboxLimits, stdin: str = "") -> Finished:
    """Run the text of a Python program with the standard library and an empty environment.

    None of its processes and files remain when this returns or raises.

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
    """Return a sealed in-memory file, positioned at its beginning.

    If programs could write to it, it would be memory without a limit.
    """
    # The caller closes it.
    file = open(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")  # noqa: SIM115
    file.write(content)
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)

    return file


# The output and the errors read from a program's streams so far, and what ended the reading.
Said = tuple[bytes, bytes, Literal["itself", "time", "output"]]


class StartedProgram:
    """A program in the sandbox whose output is read while it runs. `end` must always be called.

    The kernel ends the program with the thread that created this object.

    Args:
        stdin: A descriptor, or subprocess.PIPE.
    """

    def __init__(self, program: str, level: Level, limits: SandboxLimits, stdin: int) -> None:
        self._level = level
        self._limits = limits
        self._has_begun = False
        self._status: int | None = None

        # Descriptors of the sandbox's processes: the program's first, then those above it in the sandbox.
        self._held: list[int] = []
        self._ending = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        # The mark that identifies the processes to the reaper.
        owner = {OWNER: os.environ[OWNER]} if OWNER in os.environ else {}
        try:
            with (
                theirs,
                _sealed_file("order", order_for(program, level, limits, theirs.fileno())) as order,
            ):
                self.process = subprocess.Popen(
                    command_for(level, order.fileno()),
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
        """Read until `until` is printed, the program ends, it prints too much, or the time is over.

        The time is measured from this call, or from when the program begins.

        Args:
            given: Written to its standard input in the meantime.
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
            # A blocking write would deadlock while the program waits for its output to be read.
            if given:
                assert process.stdin is not None
                os.set_blocking(process.stdin.fileno(), False)
                streams.register(process.stdin, selectors.EVENT_WRITE)
            while streams.get_map() and ended == "itself":
                is_enough = until is not None and until in output
                ready = streams.select(0 if is_enough else max(0.0, deadline - time.monotonic()))
                if is_enough and not ready:  # the other stream is empty too
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

        return bytes(output), bytes(errors), ended

    def _receive(self) -> bytes:
        """Receive one message from the sandbox; empty if all processes that could send one have ended."""
        message, descriptors, _, _ = socket.recv_fds(self._channel, 64, 3)
        if message == PROCESSES:
            self._held = descriptors
        elif message == BEGUN:
            self._has_begun = True
        elif message.startswith(ENDED):
            self._status = int(message.removeprefix(ENDED))

        return message

    def kill(self) -> None:
        """End the program.

        This is thread-safe. Processes above the program in the sandbox then end by themselves.
        """
        with self._ending:
            if self._held:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._held[0], signal.SIGKILL)
            elif self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """End the program if it runs, and return its status.

        This waits until all processes of the sandbox have ended.
        """
        self.kill()
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

        # Unread messages may contain the process descriptors and the status.
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
        """Build the result. Raises SandboxError if the program did not begin."""
        everything, complaints, ended = said
        room = self._limits.output_kb * 1024
        output, errors = (stream[:room].decode(errors="replace") for stream in (everything, complaints))
        finished = Finished(output, errors, status, ended)

        if not self._has_begun:
            raise SandboxError(
                f"the sandbox {self._level.value} does not work here: {' '.join(errors.split()) or finished}"
            )

        return finished


def _end_held(descriptor: int) -> None:
    """Wait until the process of a descriptor has ended, and close the descriptor.

    A process that does not end by itself is killed.
    """
    if not has_ended(descriptor, _END_LIMIT_S):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        has_ended(descriptor, None)

    os.close(descriptor)


def _written(descriptor: int, data: bytes) -> int:
    """Write data and return the number of bytes written.

    If the pipe is closed, all bytes count as written; the end of the other streams shows that the program has
    ended.
    """
    try:
        return os.write(descriptor, data)
    except BrokenPipeError:
        return len(data)


# ---- selection of a level

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
    """Return why a level is not used here, in one line; empty if a test program could not escape from it."""
    with tempfile.NamedTemporaryFile("w", suffix=".canary") as canary:
        os.chmod(canary.name, 0o644)
        try:
            finished = run_program(_PROBE.format(canary=canary.name), level, SandboxLimits())
        except SandboxError as error:
            return str(error)

    # The probe prints each escape that it finds, so silence and status 0 mean that the level works.
    got_out = (
        finished.output or finished.errors or ("" if finished.status == 0 else f"status {finished.status}")
    )
    return f"the sandbox {level.value} is not effective here: {' '.join(got_out.split())}" if got_out else ""


def strongest() -> Level:
    """Return the strongest level that works here. Raises SandboxError if none does."""
    reasons = []
    # The last level is a bare process without isolation.
    for level in list(Level)[:-1]:
        if not (reason := why_not(level)):
            return level
        reasons.append(reason)

    raise SandboxError(
        f"no sandbox works on this machine: {'; '.join(reasons)}. Install bubblewrap, or allow namespaces or "
        "Landlock"
    )
