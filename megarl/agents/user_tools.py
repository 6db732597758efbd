"""Tools and environments that a user names: a function, an object or a class in a Python file, or one that ships."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megarl.agents.function_tool import FunctionTool
from megarl.agents.protocol import Environment, Tool
from megarl.agents.tool_environment import Toolbox
from megarl.agents.tools.calculator import calculator
from megarl.machine.user_functions import Expected, UserFunctionError, load_name

SHIPPED = {"calculator": calculator}
_METHODS = ("start", "respond", "close")


class UserName(NamedTuple):
    """path: of a Python file; None for what ships. name: in the file."""

    path: str | None
    name: str

    @classmethod
    def parse(cls, text: str) -> UserName:
        """Of `FILE.py:NAME`, or of the name of one that ships."""
        path, colon, name = text.rpartition(":")
        return cls(path if colon else None, name)


def load_toolbox(names: Sequence[UserName]) -> Toolbox:
    """Raises ValueError that names the tool."""
    return Toolbox([_tool(name) for name in names])


def _tool(named: UserName) -> Tool:
    if named.path is None:
        if named.name not in SHIPPED:
            there = ", ".join(sorted(SHIPPED))
            raise UserFunctionError(f"there is no tool {named.name!r} that ships, only {there}; one of your own is FILE.py:NAME")
        return FunctionTool(SHIPPED[named.name])
    expected = Expected("tool", "the tool's name", "def price(item: str) -> str:")
    found = load_name(named.path, named.name, expected)
    if inspect.isfunction(found):
        try:
            return FunctionTool(found)
        except ValueError as error:
            raise UserFunctionError(f"tool {named.name!r} in {named.path!r}: {error}") from error
    if not inspect.isclass(found) and hasattr(found, "schema") and inspect.iscoroutinefunction(getattr(found, "call", None)):
        tool: Tool = found
        return tool
    raise UserFunctionError(
        f"tool {named.name!r} in {named.path!r} is {'a class' if inspect.isclass(found) else f'a {type(found).__name__}'}, expected a "
        "function, or an object with a schema and `async def call(self, arguments, task)`"
    )


def load_environment(named: UserName) -> Callable[[], Environment]:
    """A class without arguments; an object of it is made for each episode. Raises ValueError that names it."""
    if named.path is None:
        raise UserFunctionError(f"no environment {named.name!r} ships; write FILE.py:NAME")
    found = load_name(named.path, named.name, Expected("environment", "the environment's name", "class Game:"))
    make: Callable[[], Environment] = found
    missing = [name for name in _METHODS if not inspect.iscoroutinefunction(getattr(found, name, None))]
    if not inspect.isclass(found) or missing:
        methods = ", ".join(f"`async def {name}`" for name in missing or _METHODS)
        raise UserFunctionError(f"environment {named.name!r} in {named.path!r} is no class with {methods}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UserFunctionError(f"environment {named.name!r} in {named.path!r} cannot be made without arguments ({error})") from error
    return make
