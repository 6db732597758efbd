"""Python as a tool: the model's programs run in the sandbox of this machine (megarl/machine/sandbox.py)."""

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
    """A program was terminated, or ended its own process."""


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
        self.schema: Schema = function_schema(_shape, name, description or self._description)


class PythonTool(_Python):
    """A tool that runs each call as a separate program without state.

    The result is the program's output, followed by the traceback if it raised.

    Args:
        level: The sandbox level. None: the strongest level that works on this machine.
        limits: The limits of one program.

    Raises:
        SandboxError: No sandbox works on this machine.
    """

    _description = "Runs a Python program with the standard library, and returns what it prints."

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        interpreter = _Interpreter(self._level, self._limits)
        try:
            return await interpreter.call(arguments, task)
        finally:
            await interpreter.close()


class PythonSessions(_Python):
    """A tool that runs all calls of an episode in one interpreter, which ends with the episode.

    A program that exceeds a limit takes the interpreter's state with it, and the next call starts a new
    interpreter. In `limits`, memory_mb and cpu_s apply to all calls of the episode together.
    """

    _description = (
        "Runs a Python program with the standard library, and returns what it prints. Variables persist "
        "between programs."
    )

    def session(self) -> _Interpreter:
        return _Interpreter(self._level, self._limits)


class _Interpreter:
    def __init__(self, level: Level, limits: SandboxLimits) -> None:
        self._session = SandboxSession(level, limits)
        self._limits = limits
        # One thread, so that calls run one after another. The kernel ends the interpreter with this thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="python")

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
        """Run a program.

        Raises:
            TimeoutError: The program took too long.
            ProgramEndedError: The program exceeded another limit or ended its process.
            BrokenToolError: The sandbox no longer works.
        """
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
            raise TimeoutError(f"the program took longer than {self._limits.wall_s:g} s and was terminated")
        if finished.ended == "output":
            raise ProgramEndedError(
                f"the program printed more than {self._limits.output_kb} KB and was terminated"
            )

        if not is_alive:
            how = f"signal {-finished.status}" if finished.status < 0 else f"status {finished.status}"
            raise ProgramEndedError(
                f"the program ended its process ({how}); its limit is {self._limits.cpu_s} s of CPU time"
            )

        return "\n".join(filter(None, (finished.output.rstrip("\n"), finished.errors.rstrip("\n"))))

    async def close(self) -> None:
        self._session.close()
        self._thread.shutdown(wait=False)


def _shape(code: Annotated[str, "a Python program"]) -> None:
    """Define the signature shown to the model."""
