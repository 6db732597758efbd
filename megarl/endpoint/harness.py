"""Runs an agent program for one episode: a command, or a function in this process."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from numbers import Real
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from megarl.agents.protocol import Task
from megarl.agents.sandboxes.protocol import (
    Executed,
    Sandbox,
    SandboxEndedError,
    SandboxStartError,
    end_of_output,
    write_input,
)
from megarl.agents.sandboxes.start import check_provider, open_sandbox
from megarl.config.schema import HarnessConfig, SandboxConfig
from megarl.endpoint.api_error import ApiError, invalid
from megarl.endpoint.request_fields import RequestFields, checked, wrong
from megarl.endpoint.session import AgentSession
from megarl.machine.errors import in_short
from megarl.machine.user_functions import Expected, UserFunctionError, last_line, load_name

_KEPT = 2000  # characters of a program's output in an error
_EXAMPLE = "async def run(task, endpoint):"


class HarnessFailure(str, Enum):
    """The reason why an episode of an agent program has no result. Names are those of metrics."""

    exit_code = "exit_code"  # the command ended with another status than 0
    raised = "raised"  # the function raised
    no_sandbox = "no_sandbox"  # its sandbox could not be started
    sandbox_ended = "sandbox_ended"  # its sandbox has ended early, such as at a limit of memory
    timed_out = "timed_out"
    disconnected = "disconnected"  # it timed out, and its last request was disconnected
    no_turn = "no_turn"  # it ended without a turn of the model
    bad_reward = "bad_reward"  # it returned something else than a reward
    reported = "reported"  # the client of an external agent ended the episode with an error


_SANDBOX_FAILURES: Mapping[type[Exception], HarnessFailure] = {
    SandboxStartError: HarnessFailure.no_sandbox,
    SandboxEndedError: HarnessFailure.sandbox_ended,
}


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
        sandbox_config: agent.harness.sandbox, with the image of the episode.
    """

    base_url: str
    root_url: str
    api_key: str
    environment: Mapping[str, str]
    sandbox_config: SandboxConfig

    def sandbox(self, image: str | None = None) -> AbstractAsyncContextManager[Sandbox]:
        """Start a sandbox for a block, as in `async with endpoint.sandbox() as sandbox:`.

        Args:
            image: The image, instead of that of the row or the configuration.
        """
        return open_sandbox(self.sandbox_config, image, self.root_url)


# Runs the program of a session for the server at a URL, and records the reward that it returns. Raises
# HarnessError.
Harness = Callable[[AgentSession, str], Coroutine[Any, Any, None]]


def load_harness(config: HarnessConfig, num_threads: int) -> Harness:
    """Return what runs the program of a configuration.

    Args:
        num_threads: Number of plain functions that run at the same time.

    Raises:
        ValueError: The function cannot be loaded.
    """
    has_sandbox = config.sandbox.provider is not None
    if has_sandbox:
        check_provider(config.sandbox)

    if config.function is None:
        if not has_sandbox and shutil.which(config.command[0]) is None:
            raise ValueError(
                f"agent.harness.command starts {config.command[0]!r}, which is neither a program nor a file "
                f"that can be executed"
            )
        return partial(_run_command, config.command, config.sandbox)

    path, _, name = config.function.rpartition(":")
    function = load_name(path, name, Expected("harness", "agent.harness.function", _EXAMPLE))

    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise UserFunctionError(
            f"harness {name!r} in {path!r} cannot be called with a task and an endpoint "
            f"({error}); write it as {_EXAMPLE}"
        ) from error

    threads = ThreadPoolExecutor(num_threads, thread_name_prefix="harness")
    return partial(call_function, function, config.sandbox, threads)


async def call_function(
    function: Callable[[Task, ModelEndpoint], Any],
    sandbox: SandboxConfig,
    threads: ThreadPoolExecutor,
    session: AgentSession,
    url: str,
) -> None:
    """Call a function. One that is not async runs in a thread."""
    variables = environment_of(url, session)
    image = session.task.sandbox_image
    endpoint = ModelEndpoint(
        base_url=variables["OPENAI_BASE_URL"],
        root_url=url,
        api_key=session.key,
        environment=variables,
        sandbox_config=sandbox if image is None else replace(sandbox, image=image),
    )

    try:
        if inspect.iscoroutinefunction(function):
            result = await function(session.task, endpoint)
        else:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(threads, function, session.task, endpoint)
    except (SandboxStartError, SandboxEndedError) as error:
        raise HarnessError(_SANDBOX_FAILURES[type(error)], str(error)) from error
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's code may raise anything)
        raise HarnessError(HarnessFailure.raised, last_line(error)) from error

    if result is not None:
        record_returned(session, result)


async def _run_command(parts: Sequence[str], config: SandboxConfig, session: AgentSession, url: str) -> None:
    """Start a process, in a sandbox or a process group of its own, which ends with the episode.

    The process reads its task as JSON on standard input. It may print a JSON object with `reward` in its
    last line.
    """
    task = session.task
    prompt = str(task.messages[-1].get("content", "")) if task.messages else ""
    command = [part.replace("{prompt}", prompt) for part in parts]
    given = json.dumps(task_fields(task)).encode() + b"\n"

    if config.provider is None:
        ended = await _run_here(command, given, environment_of(url, session), urlsplit(url).hostname or "")
    else:
        try:
            async with open_sandbox(config, task.sandbox_image, url) as sandbox:
                variables = environment_of(sandbox.endpoint_url, session)
                ended = await sandbox.exec(command, stdin=given, environment=variables)
        except (SandboxStartError, SandboxEndedError) as error:
            raise HarnessError(_SANDBOX_FAILURES[type(error)], str(error)) from error

    if ended.status:
        why = f"exit code {ended.status}: {ended.output[-_KEPT:].strip()}"
        raise HarnessError(HarnessFailure.exit_code, why)
    _record_printed(session, ended.output)


async def _run_here(
    command: Sequence[str], given: bytes, variables: Mapping[str, str], endpoint_host: str
) -> Executed:
    """Run a command with the rights of this process. No process that it has started remains."""
    # Requests to the endpoint must not go through a proxy.
    excluded = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), endpoint_host]))
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **variables, "NO_PROXY": excluded, "no_proxy": excluded},
        start_new_session=True,
    )

    try:
        _, output = await asyncio.gather(write_input(process, given), end_of_output(process))
        return Executed(await process.wait(), output.decode(errors="replace"))
    finally:
        # The command leads a process group of its own, so this also ends the processes that it has started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _record_printed(session: AgentSession, said: str) -> None:
    lines = said.strip().splitlines()
    try:
        printed = json.loads(lines[-1]) if lines else None
    except ValueError:
        return
    if isinstance(printed, dict) and "reward" in printed:
        record_returned(session, printed)


def record_returned(session: AgentSession, result: Any) -> None:
    """Record the reward that a program has returned, see record_reward. Raises HarnessError."""
    try:
        record_reward(session, result)
    except ApiError as error:
        raise HarnessError(HarnessFailure.bad_reward, error.message) from error


# ---- what a program receives for its episode, and the reward that it returns


_MOST_REWARD = 1e15


def task_fields(task: Task) -> dict[str, Any]:
    """Return what an agent can read about its task."""
    return {
        "messages": list(task.messages),
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.extra_info),
        "seed": task.seed,
    }


def _finite(value: Any) -> float:
    # A reward that is squared and summed in float32 must stay finite.
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    size: Any = abs(value) if is_number else math.nan
    if not size <= _MOST_REWARD:
        raise wrong(f"be a finite number between -{_MOST_REWARD:g} and {_MOST_REWARD:g}")
    return float(value)


_Reward = Annotated[float, BeforeValidator(_finite)]


class RewardFields(RequestFields):
    """The reward of an episode, and those of single turns by the ids of the responses that contained them."""

    reward: _Reward | None = None
    responses: dict[str, _Reward] = {}


def record_reward(session: AgentSession, given: Any) -> None:
    """Record the reward of an agent in its session.

    Args:
        given: The reward of the episode, or a mapping with the fields of RewardFields.

    Raises:
        ApiError: A reward is not a finite number, or no single turn has that id. Nothing is recorded then.
    """
    fields = checked(RewardFields, given if isinstance(given, Mapping) else {"reward": given})
    if fields.reward is None and not fields.responses:
        raise invalid("reward", "is missing; it must be a finite number")

    of_turns = {_turn(session, response): reward for response, reward in fields.responses.items()}
    if fields.reward is not None:
        session.reward = fields.reward
    session.turn_rewards.update(of_turns)


def _turn(session: AgentSession, response: str) -> int:
    """Return the number of the turn in a response."""
    # The ids of all APIs are the answer's own with a prefix, such as chatcmpl-.
    turns = session.answered.get(re.split("[-_]", response)[-1], ())
    if len(turns) != 1:
        raise invalid(
            f"responses[{in_short(response)}]",
            "is a response with several choices; request one"
            if turns
            else "is not a response of the episode",
        )
    return turns[0]


def environment_of(url: str, session: AgentSession) -> dict[str, str]:
    """Return the variables with which the SDKs find the session."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "MEGARL_SESSION_URL": f"{url}/session",
    }
