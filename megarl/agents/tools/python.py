"""Python as a tool: what the model writes runs in the sandbox of this machine (megarl/machine/sandbox.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from megarl.agents.function_tool import function_schema
from megarl.agents.protocol import BrokenToolError, Schema, Task
from megarl.machine.sandbox import strongest
from megarl.machine.sandbox_levels import Level, SandboxError, SandboxLimits
from megarl.machine.sandbox_session import SandboxSession

LIMITS = SandboxLimits(memory_mb=512, cpu_s=10, wall_s=15.0, output_kb=16)


class ProgramEndedError(RuntimeError):
    """A program was ended, or has ended its process."""


class _Python:
    _description: str

    def __init__(
        self,
        *,
        level: Level | None = None,
        limits: SandboxLimits = LIMITS,
        name: str = "python",
        description: str = "",
    ) -> None:
        self._level = level or strongest()
        self._limits = limits
        self._schema = function_schema(_shape, name, description or self._description)

    @property
    def schema(self) -> Schema:
        return self._schema


class PythonTool(_Python):
    """Each call is a program of its own, which remembers nothing. level: the strongest that holds where it is
    None. limits: of a program.

    What it prints is the result, with the traceback where it raised. Raises SandboxError where no sandbox
    works on this machine.
    """

    _description = "Runs a Python program with the standard library, and gives back what it prints."

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        interpreter = _Interpreter(self._level, self._limits)
        try:
            return await interpreter.call(arguments, task)
        finally:
            await interpreter.close()


class PythonSessions(_Python):
    """The same, but all calls of one episode are one interpreter's, which ends with it. limits: memory_mb and
    cpu_s are of all together.

    A program that is ended by a limit takes along what those before it have left; the next starts again.
    """

    _description = (
        "Runs a Python program with the standard library, and gives back what it prints. Its variables stay."
    )

    def session(self) -> _Interpreter:
        return _Interpreter(self._level, self._limits)


class _Interpreter:
    def __init__(self, level: Level, limits: SandboxLimits) -> None:
        self._session = SandboxSession(level, limits)
        self._limits = limits
        # One, in which calls wait for each other; the kernel ends the interpreter with it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="python")

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        """Raises TimeoutError, ProgramEndedError; BrokenToolError where the sandbox does not work any
        more."""
        try:
            finished, is_alive = await asyncio.wrap_future(
                self._thread.submit(self._session.run, arguments["code"])
            )
        except asyncio.CancelledError:
            # The program must end too, or it would occupy the thread until its own limit.
            self._session.interrupt()
            raise
        except SandboxError as error:
            raise BrokenToolError(str(error)) from error

        if finished.ended == "time":
            raise TimeoutError(f"the program took longer than {self._limits.wall_s:g} s and was ended")
        if finished.ended == "output":
            raise ProgramEndedError(
                f"the program printed more than {self._limits.output_kb} KB and was ended"
            )

        if not is_alive:
            how = f"signal {-finished.status}" if finished.status < 0 else f"status {finished.status}"
            raise ProgramEndedError(
                f"the program has ended its process ({how}); it may have {self._limits.cpu_s} s of computing"
            )

        return "\n".join(filter(None, (finished.output.rstrip("\n"), finished.errors.rstrip("\n"))))

    async def close(self) -> None:
        self._session.close()
        self._thread.shutdown(wait=False)


def _shape(code: Annotated[str, "a Python program"]) -> None:
    """The signature that the model is told of."""
