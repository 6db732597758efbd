"""A persistent interpreter in the sandbox.

Programs run in it one after another, each with the state left by the previous ones.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import threading

from megarl.machine.sandbox import Finished, StartedProgram
from megarl.machine.sandbox_levels import Level, SandboxLimits

# Commands arrive on a descriptor that programs do not read by accident. A mark indicates the end of a
# program.
_LOOP = """
import json, linecache, os, sys, traceback
commands, streams = os.fdopen(os.dup(0)), (sys.stdout, sys.stderr)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
def run(number, program, names={{"__name__": "__main__"}}):
    place = f"<program {{number}}>"
    linecache.cache[place] = (len(program), None, program.splitlines(keepends=True), place)
    try:
        exec(compile(program, place, "exec", dont_inherit=True), names)
    except BaseException as error:
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next), file=streams[1])
        return 1
    return 0
for number, command in enumerate(commands, 1):
    status = run(number, json.loads(command))
    for stream in streams:
        stream.flush()
    os.write(1, f"{{status}} {mark}\\n".encode())
"""


class SandboxSession:
    """A session of an interpreter.

    In `limits`, output_kb and wall_s apply to one program, all others to all programs together.

    `run` must always be called by the same thread, which must live as long as the session, because the kernel
    ends the process with it. `interrupt` and `close` may be called by other threads, also during `run`.
    """

    def __init__(self, level: Level, limits: SandboxLimits) -> None:
        self._level = level
        self._limits = limits
        self._mark = secrets.token_hex(16)
        self._started: StartedProgram | None = None
        self._is_closed = False
        self._starting = threading.Lock()
        self._running = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether a program is running now."""
        return self._running.locked()

    def run(self, program: str) -> tuple[Finished, bool]:
        """Run a program. If an earlier one has ended the process, a new process without state starts.

        Returns:
            The result, whose status is 0, or 1 if the program raised; and whether the state is available to
            the next program.

        Raises:
            SandboxError: The level does not work here.
            RuntimeError: The session is closed.
        """
        with self._running:
            started = self._start()
            mark = f" {self._mark}\n".encode()
            said = started.read(json.dumps(program).encode() + b"\n", until=mark)
            everything, errors, ended = said
            output, is_whole, _ = everything.partition(mark)
            # The character before the mark shows whether the program ended without an exception.
            if is_whole and ended == "itself":
                return started.finished((output[:-1], errors, ended), int(output[-1:] != b"0")), True
            self._started = None
            return started.finished(said, started.end()), False

    def interrupt(self) -> None:
        """End the running program, and discard the state of the previous ones."""
        with self._starting:
            if self._started is not None:
                self._started.kill()

    def close(self) -> None:
        """End the session, including a running program."""
        with self._starting:
            self._is_closed = True
        self.interrupt()

        with self._running:
            if self._started is not None:
                self._started.end()
                self._started = None

    def _start(self) -> StartedProgram:
        with self._starting:
            if self._is_closed:
                raise RuntimeError("the session is closed")
            if self._started is None:
                self._started = StartedProgram(
                    _LOOP.format(mark=self._mark), self._level, self._limits, subprocess.PIPE
                )
            return self._started
