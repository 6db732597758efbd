"""Runs what a model wrote, in a process that can do no harm: without network, without other processes, with its own files only, for so
long and with so much memory and output.

What that process gives up by itself is in megarl/machine/confined.py. Where the machine has more, it is put into namespaces too: by
bubblewrap, which shows it a file system of its own with a `/tmp` to write to, or by `unshare`. A level is used where it is seen to work:
a container may forbid namespaces, a kernel may have no Landlock.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Literal, NamedTuple

from megarl.machine import confined

_SCRIPT = Path(confined.__file__).absolute()
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")  # what programs begin with; read only
START_LIMIT_S = 60.0  # until a program begins, on a busy machine; its own time counts from there
# Folders that this interpreter reads its libraries from, beside the system's.
_PYTHONS = tuple(
    sorted({sys.prefix, sys.base_prefix, *map(os.path.realpath, (sys.base_prefix, os.__file__ + "/..", sys.executable + "/.."))})
)
READABLE = (*_SYSTEM, *_PYTHONS, "/dev/null", "/dev/zero", "/dev/urandom")
WRITABLE = ("/dev/null",)


class Level(str, Enum):
    """From the strongest to the weakest; the last is none, and never chosen unless by name."""

    bubblewrap = "bubblewrap"  # namespaces and a file system of its own, by `bwrap`
    namespaces = "namespaces"  # of processes, network and mounts, by `unshare`; files by Landlock
    landlock = "landlock"  # files by Landlock, all else by seccomp: nothing has to be installed or allowed
    process = "process"  # limits of memory and time only


class SandboxError(RuntimeError):
    """No sandbox works on this machine, or the level that was asked for does not; the message says why, and what to change."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """memory_mb: of address space. cpu_s, wall_s: seconds of the processor and of the clock. output_kb: of what it prints, on both
    streams together. disk_mb: of what it writes to /tmp, where it has one."""

    memory_mb: int = 512
    cpu_s: int = 10
    wall_s: float = 15.0
    output_kb: int = 64
    disk_mb: int = 16


class Finished(NamedTuple):
    """What a program did. ended: by itself, or by which limit it was. status: as of a subprocess; below 0 the signal's number."""

    output: str
    errors: str
    status: int
    ended: Literal["itself", "time", "output"]


def run_program(program: str, level: Level, limits: SandboxLimits, stdin: str = "") -> Finished:
    """Runs the text of a Python program, with the standard library and nothing else, from an empty environment.

    When this returns, none of its processes and files is left. Raises SandboxError where `level` does not work here.
    """
    with open(os.memfd_create("stdin", 0), "w+b") as given:
        given.write(stdin.encode())
        given.seek(0)
        started = StartedProgram(program, level, limits, given.fileno())
        try:
            said = started.read()
            if said.ended == "itself" and not started.ends(said.deadline):
                said = said._replace(ended="time")
        finally:
            status = started.end()
    return started.finished(said, status)


def _command(level: Level, limits: SandboxLimits, program: int, begun: int) -> list[str]:
    readable, writable = ((*READABLE, "/proc"), (*WRITABLE, "/tmp")) if level is Level.bubblewrap else (READABLE, WRITABLE)
    of_process = confined.ProcessLimits(limits.memory_mb, limits.cpu_s, limits.disk_mb)
    order = confined.Order(program, begun, of_process, readable, writable, level is not Level.process)
    python = [sys.executable, "-I", "-S", "-B", str(_SCRIPT), json.dumps(order)]
    if level not in (Level.bubblewrap, Level.namespaces):
        return python
    around = [_tool("setpriv", level), "--pdeathsig", "KILL"]  # of the outermost process: the innermost says it for itself
    if level is Level.namespaces:
        around += [_tool("unshare", level), "--fork", "--kill-child", "--pid", "--net", "--ipc", "--uts", "--mount", "--mount-proc"]
        around += [] if os.geteuid() == 0 else ["--map-root-user"]
    else:
        around += [
            _tool("bwrap", level),
            "--unshare-all",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
        ]
        around += ["--size", str(limits.disk_mb * 2**20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
        for path in (*_SYSTEM, *_PYTHONS, str(_SCRIPT)):
            around += ["--ro-bind-try", path, path]
    return [*around, *python]


def _tool(name: str, level: Level) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxError(f"the sandbox {level.value} needs {name!r}, which is not installed")
    return path


class Said(NamedTuple):
    """What has been read of a program's streams. deadline: of time.monotonic."""

    output: bytes
    errors: bytes
    ended: Literal["itself", "time", "output"]
    deadline: float


class StartedProgram:
    """A process in the sandbox, whose output is read while it runs. stdin: a descriptor, or subprocess.PIPE.

    The kernel ends it with the thread that made it. Call `end`, whatever happens.
    """

    def __init__(self, program: str, level: Level, limits: SandboxLimits, stdin: int) -> None:
        self._level, self._limits = level, limits
        begun, says_begun = os.pipe()
        self._start: IO[bytes] | None = open(begun, "rb", buffering=0)  # noqa: SIM115  (until the program begins)
        self._has_begun = False
        with open(os.memfd_create("program", 0), "w+b") as text:
            text.write(program.encode())
            text.seek(0)
            try:
                self.process = subprocess.Popen(
                    _command(level, limits, text.fileno(), says_begun),
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=[text.fileno(), says_begun],
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
            except BaseException:
                self._start.close()
                raise
            finally:
                os.close(says_begun)

    def read(self, given: bytes = b"", until: bytes | None = None) -> Said:
        """Until `until` stands in what it prints, both streams end, too much has come, or the time is over, which counts from here or
        from when the program begins. given: is written to its standard input meanwhile."""
        process, limits = self.process, self._limits
        assert process.stdout is not None
        assert process.stderr is not None
        room, output, errors = limits.output_kb * 1024, bytearray(), bytearray()
        deadline = time.monotonic() + (START_LIMIT_S if self._start is not None else limits.wall_s)
        ended: Literal["itself", "time", "output"] = "itself"
        with selectors.DefaultSelector() as streams:
            streams.register(process.stdout, selectors.EVENT_READ, output)
            streams.register(process.stderr, selectors.EVENT_READ, errors)
            if self._start is not None:
                streams.register(self._start, selectors.EVENT_READ)
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
                    if key.fileobj is self._start:
                        self._has_begun, deadline = bool(os.read(key.fd, 1)), time.monotonic() + limits.wall_s
                        streams.unregister(key.fileobj)
                        self._close_start()
                    elif key.fileobj is process.stdin:
                        given = given[_written(key.fd, given) :]
                        if not given:
                            streams.unregister(key.fileobj)
                    elif chunk := os.read(key.fd, 65536):
                        key.data.extend(chunk)
                    else:
                        streams.unregister(key.fileobj)
                if len(output) + len(errors) > room + len(until or b""):
                    ended = "output"
                elif time.monotonic() >= deadline:
                    ended = "time"
        return Said(bytes(output), bytes(errors), ended, deadline)

    def ends(self, deadline: float) -> bool:
        """By itself."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """By any thread. What it started ends with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Its status, when nothing of it lives."""
        self.kill()
        status = self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self._close_start()
        return status

    def finished(self, said: Said, status: int) -> Finished:
        """Raises SandboxError where the program did not begin."""
        room = self._limits.output_kb * 1024
        output, errors = (stream[:room].decode(errors="replace") for stream in (said.output, said.errors))
        finished = Finished(output, errors, status, said.ended)
        if not self._has_begun:
            raise SandboxError(f"the sandbox {self._level.value} does not work here: {' '.join(errors.split()) or finished}")
        return finished

    def _close_start(self) -> None:
        if self._start is not None:
            self._start.close()
            self._start = None


def _written(descriptor: int, data: bytes) -> int:
    """How much of it; all where nobody reads any more, which the end of the other streams tells."""
    try:
        return os.write(descriptor, data)
    except BrokenPipeError:
        return len(data)


# ---- which level a machine has

_PROBE = """
import os, socket
for name, attempt in {{"read a file": lambda: open({canary!r}).read(), "open a socket": socket.socket, "start a process": os.fork}}.items():
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
    got_out = finished.output or finished.errors or ("" if finished.status == 0 else f"status {finished.status}")
    return f"the sandbox {level.value} does not hold here: {' '.join(got_out.split())}" if got_out else ""


def strongest() -> Level:
    """Raises SandboxError where none holds."""
    reasons = []
    for level in list(Level)[:-1]:
        if not (reason := why_not(level)):
            return level
        reasons.append(reason)
    raise SandboxError(f"no sandbox works on this machine: {'; '.join(reasons)}. Install bubblewrap, or allow namespaces or Landlock")
