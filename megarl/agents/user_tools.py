"""Loads the tools and environments that a config names, and tries one turn with them before a run starts.

They are functions, objects or classes in a Python file, or built-in tools.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megarl.agents.episode import AnswerTurn
from megarl.agents.function_tool import FunctionTool
from megarl.agents.protocol import Environment, Message, Schema, SessionTool, Task, Tool
from megarl.agents.responder import EnvironmentFailedError, Responder
from megarl.agents.strict_calls import parse_calls
from megarl.agents.tool_environment import Toolbox, ToolEnvironment
from megarl.agents.tools.calculator import calculator
from megarl.agents.tools.python import PythonSessions, PythonTool
from megarl.config.schema import AgentConfig
from megarl.machine.sandbox_levels import SandboxError
from megarl.machine.user_functions import Expected, UserFunctionError, last_line, load_name

SHIPPED: dict[str, Callable[[], Tool | SessionTool]] = {
    "calculator": lambda: FunctionTool(calculator),
    "python": PythonTool,
    "python_session": PythonSessions,
}
_METHODS = ("start", "respond", "close")
ANSWER = "I do not know."  # the turn that the environment answers
_CALL = '<tool_call>{"name": "a-tool-that-there-is-not", "arguments": {}}</tool_call>'


def load_agent(agent: AgentConfig) -> tuple[Callable[[], Environment], Sequence[Schema] | None]:
    """Run the files that the section names and load its tools or environment.

    Returns:
        A function that creates the environment of one episode, and the schemas of the tools that the model is
        shown. They are None for a custom environment.

    Raises:
        ValueError: A tool or the environment cannot be loaded; the message names it.
    """
    if agent.environment.path is not None:
        return _environment(agent.environment.path), None

    toolbox = Toolbox([_tool(tool) for tool in agent.tools])

    def make() -> Environment:
        return ToolEnvironment(
            toolbox, max_parallel=agent.max_parallel_calls, time_limit_s=agent.time_limit_s
        )

    return make, toolbox.schemas


def _tool(reference: str) -> Tool | SessionTool:
    path, _, name = reference.rpartition(":")
    if not path:
        if name not in SHIPPED:
            there = ", ".join(sorted(SHIPPED))
            raise UserFunctionError(
                f"there is no built-in tool {name!r}, only {there}; write FILE.py:NAME for a tool of your own"
            )
        try:
            return SHIPPED[name]()
        except SandboxError as error:
            raise UserFunctionError(f"tool {name!r}: {error}") from error

    # The user's own tool: a function, or an object with sessions or with `call`.
    found = load_name(path, name, Expected("tool", "agent.tools", "def price(item: str) -> str:"))
    if inspect.isfunction(found):
        try:
            return FunctionTool(found)
        except ValueError as error:
            raise UserFunctionError(f"tool {name!r} in {path!r}: {error}") from error

    # isinstance alone would accept a class, whose methods cannot be called without an object.
    if not inspect.isclass(found) and isinstance(found, SessionTool):
        return found
    if (
        not inspect.isclass(found)
        and hasattr(found, "schema")
        and inspect.iscoroutinefunction(getattr(found, "call", None))
    ):
        made: Tool = found
        return made

    raise UserFunctionError(
        f"tool {name!r} in {path!r} is "
        f"{'a class' if inspect.isclass(found) else f'a {type(found).__name__}'}, expected a "
        "function, or an object with a schema and `async def call(self, arguments, task)`"
    )


def _environment(reference: str) -> Callable[[], Environment]:
    """Load an environment class. One object of it is made, without arguments, for each episode."""
    path, _, name = reference.rpartition(":")
    found = load_name(path, name, Expected("environment", "agent.environment", "class Game:"))
    make: Callable[[], Environment] = found
    missing = [each for each in _METHODS if not inspect.iscoroutinefunction(getattr(found, each, None))]

    if not inspect.isclass(found) or missing:
        methods = ", ".join(f"`async def {each}`" for each in missing or _METHODS)
        raise UserFunctionError(f"environment {name!r} in {path!r} is not a class with {methods}")

    # An environment that needs arguments would otherwise fail in the first episode.
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UserFunctionError(
            f"environment {name!r} in {path!r} cannot be instantiated without arguments ({error})"
        ) from error

    return make


# ---- one turn before a run starts


class _Text:
    """Represents the tokens of a turn with this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self, token_ids: list[int]) -> str:
        return self._text

    def bridge_from(self, token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return [len(messages)]


def try_agent(agent: AgentConfig, task: Task | None) -> tuple[list[dict[str, Any]] | None, Sequence[Message]]:
    """Load an agent's tools or environment, and have them answer a first turn.

    Tools answer a call of a tool that does not exist, so no user tool runs. An environment starts an episode
    about `task` and answers a turn in which the model wrote ANSWER.

    Args:
        task: The first row of the data. None: no data is available on this machine, so an environment is only
            loaded.

    Returns:
        The schemas of the tools, None for an environment; and what the environment replied.

    Raises:
        ValueError: A file cannot be loaded.
        EnvironmentFailedError: The environment raised an exception or returned an invalid reply.
    """
    make, schemas = load_agent(agent)
    tools = None if schemas is None else [dict(schema) for schema in schemas]
    if tools is None and task is None:
        return None, ()
    text = ANSWER if tools is None else _CALL

    async def play() -> Sequence[Message]:
        try:
            environment = make()
        except Exception as error:  # noqa: BLE001  (the user's code may raise anything)
            raise EnvironmentFailedError(
                f"agent.environment cannot be instantiated: {last_line(error)}"
            ) from error

        responder = Responder(environment, _Text(text), parse_calls, task or Task())
        await responder.start()

        try:
            _, reply = await responder.answer(AnswerTurn((0, 0), [0], is_last=agent.max_turns == 1))
        finally:
            await responder.close()

        return reply.messages

    messages = asyncio.run(play())
    return tools, messages if tools is None else ()
