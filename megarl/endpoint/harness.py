"""Runs an agent program for one episode: a command, or a function in this process."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol
from urllib.parse import urlsplit

from megarl.agents.protocol import Task
from megarl.config.schema import HarnessConfig
from megarl.endpoint.api_error import ApiError
from megarl.endpoint.session import AgentSession
from megarl.endpoint.session_access import environment_of, record_reward, task_fields
from megarl.machine.user_functions import Expected, UserFunctionError, last_line, load_name

_KEPT = 2000  # characters of a program's output in an error
_CHUNK = 1 << 16
_EXAMPLE = "async def run(task, endpoint):"


class HarnessFailure(str, Enum):
    """The reason why an episode of an agent program has no result. Names are those of metrics."""

    exit_code = "exit_code"  # the command ended with another status than 0
    raised = "raised"  # the function raised
    timed_out = "timed_out"
    disconnected = "disconnected"  # it timed out, and its last request was disconnected
    no_turn = "no_turn"  # it ended without a turn of the model
    bad_reward = "bad_reward"  # it returned something else than a reward
    reported = "reported"  # the client of an external agent ended the episode with an error


class HarnessError(Exception):
    """The program of an episode failed."""

    def __init__(self, kind: HarnessFailure, why: str) -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class ModelEndpoint:
    """The address and key by which a function reaches the model.

    Attributes:
        base_url: For OpenAI's SDK. Anthropic's takes `root_url`.
        api_key: The key of the episode, for both.
        environment: The same as variables of a process: `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
            `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`.
    """

    base_url: str
    root_url: str
    api_key: str
    environment: Mapping[str, str]


class Harness(Protocol):
    async def run(self, session: AgentSession, url: str) -> None:
        """Run the program, and record the reward that it returns. Raises HarnessError."""


def load_harness(config: HarnessConfig, num_threads: int) -> Harness:
    """Return what runs the program of a configuration.

    Args:
        num_threads: Number of plain functions that run at the same time.

    Raises:
        ValueError: The function cannot be loaded.
    """
    path = config.function.path
    if path is None:
        if shutil.which(config.command[0]) is None:
            raise ValueError(
                f"agent.harness.command starts {config.command[0]!r}, which is neither a program nor a file "
                f"that can be executed"
            )
        return CommandHarness(config.command)
    expected = Expected("harness", "agent.harness.function.name", _EXAMPLE)
    function = load_name(path, config.function.name, expected)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UserFunctionError(
            f"harness {config.function.name!r} in {path!r} cannot be called with a task and an endpoint "
            f"({error}); write it as {_EXAMPLE}"
        ) from error
    return FunctionHarness(function, num_threads)


class FunctionHarness:
    """Calls a function per episode. One that is not async runs in a thread."""

    def __init__(self, function: Callable[[Task, ModelEndpoint], Any], num_threads: int) -> None:
        self._function = function
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="harness")

    async def run(self, session: AgentSession, url: str) -> None:
        variables = environment_of(url, session)
        endpoint = ModelEndpoint(
            base_url=variables["OPENAI_BASE_URL"], root_url=url, api_key=session.key, environment=variables
        )
        try:
            if inspect.iscoroutinefunction(self._function):
                result = await self._function(session.task, endpoint)
            else:
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, self._function, session.task, endpoint)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's code may raise anything)
            raise HarnessError(HarnessFailure.raised, last_line(error)) from error
        if result is not None:
            _record_returned(session, result)


class CommandHarness:
    """Starts a process per episode, in a process group of its own, which is killed when the episode ends.

    The process reads its task as JSON on standard input. It may print a JSON object with `reward` in its last
    line.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    async def run(self, session: AgentSession, url: str) -> None:
        prompt = str(session.task.messages[-1].get("content", "")) if session.task.messages else ""
        host = urlsplit(url).hostname or ""
        excluded = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), host]))
        process = await asyncio.create_subprocess_exec(
            *(part.replace("{prompt}", prompt) for part in self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **environment_of(url, session), "NO_PROXY": excluded, "no_proxy": excluded},
            start_new_session=True,
        )
        try:
            _, said = await asyncio.gather(_write_task(process, session.task), _last_output(process))
            status = await process.wait()
        finally:
            # End the processes that it has started, too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

        if status:
            raise HarnessError(HarnessFailure.exit_code, f"exit code {status}: {said[-_KEPT:].strip()}")
        _record_printed(session, said)


async def _write_task(process: asyncio.subprocess.Process, task: Task) -> None:
    assert process.stdin is not None
    # A program that does not read its task may end before it is written.
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(json.dumps(task_fields(task)).encode() + b"\n")
        await process.stdin.drain()
    process.stdin.close()


async def _last_output(process: asyncio.subprocess.Process) -> str:
    """Return the end of what a process writes, however much it is."""
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(_CHUNK):
        kept = (kept + chunk)[-_CHUNK:]
    return kept.decode(errors="replace")


def _record_printed(session: AgentSession, said: str) -> None:
    lines = said.strip().splitlines()
    try:
        printed = json.loads(lines[-1]) if lines else None
    except ValueError:
        return
    if isinstance(printed, dict) and "reward" in printed:
        _record_returned(session, printed)


def _record_returned(session: AgentSession, result: Any) -> None:
    try:
        record_reward(session, result)
    except ApiError as error:
        raise HarnessError(HarnessFailure.bad_reward, error.message) from error
