"""Tools made from plain functions. The signature becomes the schema and the docstring the description."""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from megarl.agents.protocol import Schema, Task, ToolResult
from megarl.machine.background import in_background

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


class FunctionTool:
    """A tool that calls `function`.

    Each parameter must be annotated with str, int, float, bool, list, dict, list[one of these], a Literal, or
    one of them or None. Annotated[str, "text"] adds a description. A parameter named `task` receives the Task
    and is not shown to the model. A coroutine function is awaited; any other function runs in its own thread.

    Raises:
        ValueError: The signature cannot be expressed as a schema.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.schema: Schema = function_schema(function)
        self._takes_task = "task" in inspect.signature(function).parameters

    async def call(self, arguments: Mapping[str, Any], task: Task) -> str | ToolResult:
        given = {**arguments, "task": task} if self._takes_task else {**arguments}
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**given)
        else:
            result = await in_thread(lambda: self._function(**given))
        return result if isinstance(result, ToolResult) else str(result)


def function_schema(
    function: Callable[..., Any], name: str | None = None, description: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's {"type": "function", "function": {...}} for a function.

    Args:
        name: Replaces the function's own name.
        description: Replaces the function's docstring.

    Raises:
        ValueError: The signature cannot be expressed as a schema, see FunctionTool.
    """
    name = name or function.__name__
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ValueError(f"the annotations of {name} cannot be read ({error})") from error

    properties: dict[str, Any] = {}
    required = []

    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"{name} takes {parameter}, but a model passes arguments by name; declare each by name"
            )
        # The task comes from the episode, not from the model.
        if parameter.name == "task":
            continue
        if parameter.name not in hints:
            raise ValueError(
                f"the parameter {parameter.name!r} of {name} has no annotation; write {parameter.name}: "
                f"str, or its type"
            )
        try:
            properties[parameter.name] = _schema_of(hints[parameter.name])
        except ValueError as error:
            raise ValueError(
                f"the parameter {parameter.name!r} of {name} is annotated with {error}"
            ) from error
        if parameter.default is parameter.empty:
            required.append(parameter.name)

    parameters = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    described = {
        "name": name,
        "description": description or inspect.getdoc(function) or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": described}


def _schema_of(annotation: Any) -> dict[str, Any]:
    origin = get_origin(annotation)
    arguments = get_args(annotation)

    if origin is Annotated:
        texts = [each for each in arguments[1:] if isinstance(each, str)]
        return _schema_of(arguments[0]) | ({"description": texts[0]} if texts else {})

    if origin is Literal and all(isinstance(each, str | int | bool) for each in arguments):
        return {"enum": list(arguments)}
    # `X | None` is the only union that is supported.
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        (other,) = (each for each in arguments if each is not type(None))
        return {"anyOf": [_schema_of(other), {"type": "null"}]}

    if origin is list:
        return {"type": "array", "items": _schema_of(arguments[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1])}
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    raise ValueError(
        f"{annotation!r}, which a model cannot write; use str, int, float, bool, list, dict or a Literal"
    )


async def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a daemon thread, so that a function that hangs cannot delay the end of the process.

    asyncio.to_thread would wait for it.
    """

    def guarded() -> Any:
        try:
            return function()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
                raise
            # asyncio lets SystemExit end its loop, and with it the episodes of all callers. A future cannot
            # hold StopIteration, and with CancelledError it would cancel the caller.
            raise RuntimeError(repr(error)) from error

    return await asyncio.wrap_future(in_background(guarded, "tool"))
