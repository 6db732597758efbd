"""Tools and environments that a user names: a function, an object or a class in a Python file, or one that
ships."""

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
    """make: the environment of one episode. tools: that the model is told of, None where it is told of
    none."""

    make: Callable[[], Environment]
    tools: Sequence[Schema] | None


def load_agent(agent: AgentConfig) -> LoadedAgent:
    """Runs the files that the section names. Raises ValueError that names the tool or the environment."""
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
                f"there is no tool {tool.name!r} that ships, only {there}; one of your own is in a file"
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
    """A class without arguments; an object of it is made for each episode."""
    found = load_name(path, config.name, Expected("environment", "the environment's name", "class Game:"))
    make: Callable[[], Environment] = found
    missing = [name for name in _METHODS if not inspect.iscoroutinefunction(getattr(found, name, None))]

    if not inspect.isclass(found) or missing:
        methods = ", ".join(f"`async def {name}`" for name in missing or _METHODS)
        raise UserFunctionError(f"environment {config.name!r} in {path!r} is no class with {methods}")

    # An environment that needs arguments would otherwise fail in the first episode.
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UserFunctionError(
            f"environment {config.name!r} in {path!r} cannot be made without arguments ({error})"
        ) from error

    return make
