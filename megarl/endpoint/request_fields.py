"""Readers of the fields that requests of several APIs share. Each raises ApiError for an invalid value."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from megarl.endpoint.api_error import ApiError, invalid, unsupported


def positive(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these fields that is set, or None."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise invalid(name, f"is {value!r}; it must be a positive integer")
        return value
    return None


def objects(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise invalid(name, "must be a list of objects")
    return value


def stop_texts(value: Any, name: str) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise invalid(name, f"is {value!r}; it must be a text or a list of texts that are not empty")
    return texts


def joined_text(content: Any, where: str, kinds: Collection[str]) -> str:
    """Return the text of a message's content: a text, or a list of parts of these kinds."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(objects(content, where)):
        kind = part.get("type")
        if kind not in kinds:
            raise unsupported(f"{where}[{index}].type={kind!r}", "messages may contain text only")
        texts.append(part.get("text") or part.get("refusal") or "")
    return "".join(texts)


def parsed_arguments(text: Any) -> Any:
    """Return the arguments of a call, which APIs write as JSON in a text."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def function_schema(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """Return the schema of a tool, as chat templates read it."""
    if not isinstance(name, str):
        raise invalid(where, "has a tool without a name")
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def openai_tools(
    tools: Any, function_of: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[dict[str, Any]] | None:
    """Return the tools of a request to an API of OpenAI, or None without tools.

    Args:
        function_of: Returns the fields of a tool's function, which the APIs write in different places.
    """
    if not tools:
        return None
    made = []
    for index, tool in enumerate(objects(tools, "tools")):
        if tool.get("type") != "function":
            raise unsupported(f"tools[{index}].type={tool.get('type')!r}", "tools must be functions")
        function = function_of(tool)
        name, description = function.get("name"), function.get("description")
        made.append(function_schema(name, description, function.get("parameters"), f"tools[{index}]"))
    return made


def template_role(message: Mapping[str, Any], roles: Mapping[str, str], where: str) -> str:
    """Return the role of a message as chat templates read it. `roles` has the API's roles."""
    role = message.get("role")
    if role not in roles:
        raise invalid(f"{where}.role", f"is {role!r}; it must be one of {', '.join(roles)}")
    return roles[role]


def call_of(call_id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """Return a call of an earlier turn, as chat templates read it."""
    if not isinstance(name, str):
        raise invalid(where, "has a call without a name")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def bearer_key(request: Request) -> str:
    """Return the key of a request, from the header of either API."""
    headers = request.headers
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


async def json_body(request: Request) -> dict[str, Any]:
    """Return the JSON object that a request contains."""
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return body
