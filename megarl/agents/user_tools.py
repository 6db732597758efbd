"""Loads the tools and environments that a config names.

They are functions, objects or classes in a Python file, or built-in tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megarl.agents.function_tool import FunctionTool
from megarl.agents.protocol import Environment, Schema, SessionTool, Tool
from megarl.agents.tool_environment import CallLimits, Toolbox, ToolEnvironment
from megarl.agents.tools.calculator import calculator
from megarl.agents.tools.python import PythonSessions, PythonTool
from megarl.config.schema import AgentConfig, EnvironmentConfig, ToolConfig
from megarl.machine.sandbox_levels import SandboxError
from megarl.machine.user_functions import Expected, UserFunctionError, load_name

SHIPPED: dict[str, Callable[[], Tool | SessionTool]] = {
    "calculator": lambda: FunctionTool(calculator),
    "python": PythonTool,
    "python_session": PythonSessions,
}
_METHODS = ("start", "respond", "close")


class LoadedAgent(NamedTuple):
    """A loaded agent.

    Attributes:
        make: Creates the environment of one episode.
        tools: The schemas shown to the model. None for a custom environment.
    """

    make: Callable[[], Environment]
    tools: Sequence[Schema] | None


def load_agent(agent: AgentConfig) -> LoadedAgent:
    """Run the files that the section names and load its tools or environment.

    Raises:
        ValueError: A tool or the environment cannot be loaded; the message names it.
    """
    if agent.environment.path is not None:
        return LoadedAgent(_environment(agent.environment.path, agent.environment), None)
    toolbox = Toolbox([_tool(tool) for tool in agent.tools])
    limits = CallLimits(max_parallel=agent.max_parallel_calls, time_limit_s=agent.time_limit_s)
    return LoadedAgent(lambda: ToolEnvironment(toolbox, limits), toolbox.schemas)


def _tool(tool: ToolConfig) -> Tool | SessionTool:
    if tool.path is None:
        if tool.name not in SHIPPED:
            there = ", ".join(sorted(SHIPPED))
            raise UserFunctionError(
                f"there is no built-in tool {tool.name!r}, only {there}; for a tool of your own, set its path"
            )
        try:
            return SHIPPED[tool.name]()
        except SandboxError as error:
            raise UserFunctionError(f"tool {tool.name!r}: {error}") from error

    # The user's own tool: a function, or an object with sessions or with `call`.
    found = load_name(
        tool.path, tool.name, Expected("tool", "the tool's name", "def price(item: str) -> str:")
    )
    if inspect.isfunction(found):
        try:
            return FunctionTool(found)
        except ValueError as error:
            raise UserFunctionError(f"tool {tool.name!r} in {tool.path!r}: {error}") from error

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
        f"tool {tool.name!r} in {tool.path!r} is "
        f"{'a class' if inspect.isclass(found) else f'a {type(found).__name__}'}, expected a "
        "function, or an object with a schema and `async def call(self, arguments, task)`"
    )


def _environment(path: str, config: EnvironmentConfig) -> Callable[[], Environment]:
    """Load an environment class. One object of it is made, without arguments, for each episode."""
    found = load_name(path, config.name, Expected("environment", "the environment's name", "class Game:"))
    make: Callable[[], Environment] = found
    missing = [name for name in _METHODS if not inspect.iscoroutinefunction(getattr(found, name, None))]

    if not inspect.isclass(found) or missing:
        methods = ", ".join(f"`async def {name}`" for name in missing or _METHODS)
        raise UserFunctionError(f"environment {config.name!r} in {path!r} is not a class with {methods}")

    # An environment that needs arguments would otherwise fail in the first episode.
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UserFunctionError(
            f"environment {config.name!r} in {path!r} cannot be instantiated without arguments ({error})"
        ) from error

    return make
