"""Environments of `openenv`: servers with `reset` and `step`, which the model answers turn by turn.

The name is the URL of a server; or FILE.py:NAME or MODULE:NAME of an application, which is served here; or an
environment that openenv starts itself (`GenericEnvClient.from_env`), with the other arguments. The argument
`reset` has further values for each reset, and `num_sessions` is the server's limit of sessions (1).

The seed of a row is that of its reset. Where the actions are calls of tools, the model gets the tools.
Otherwise its text is the action: JSON, or the value of the only required field. An action that cannot be read
is answered with the reason. The reward is the sum of those of the steps.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from megarl_player import EpisodeLimitError, served
from openenv.core import GenericEnvClient

_TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")  # titles of schemas
_OF_STEPS = ("done", "reward", "metadata")  # fields of observations that are not for the model


class OpenEnvEnvironment:
    def __init__(
        self, name: str, url: str, schema: Mapping[str, Any], num_sessions: int, reset: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._url = url
        self._schema = schema
        self._sessions = asyncio.Semaphore(num_sessions)
        self._reset = dict(reset)

    async def rows(self, size: int, seed: int) -> AsyncIterator[dict[str, Any]]:
        for number in range(seed, seed + size):
            values = {**self._reset, "seed": number}
            async with self._sessions, GenericEnvClient(base_url=self._url) as client:
                first = await client.reset(**values)
            yield {
                "prompt": [*self._instructions(), _message(first.observation)],
                "data_source": f"openenv/{self._name}",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"reset": json.dumps(values)},
            }

    async def play(self, task: dict[str, Any], endpoint: Any) -> tuple[float, dict[str, float]]:
        async with self._sessions, GenericEnvClient(base_url=self._url) as client:
            tools = await self._tools(client)
            result = await client.reset(**json.loads(task["extra_info"]["reset"]))
            messages = [*task["messages"][:-1], _message(result.observation)]
            reward = result.reward or 0.0
            steps = 0

            while not result.done:
                try:
                    answer = await endpoint.chat(messages, tools)
                except EpisodeLimitError:
                    break
                messages.append(answer)
                if tools and not answer.get("tool_calls"):
                    break
                for action, respond in self._actions(answer, tools):
                    if isinstance(action, str):  # why it cannot be read
                        messages.append(respond(action))
                        continue
                    result = await client.step(action)
                    steps += 1
                    reward += result.reward or 0.0
                    messages.append(respond(_text(result.observation)))
        return reward, {"steps": steps, "is_done": result.done}

    async def _tools(self, client: Any) -> list[dict[str, Any]]:
        if self._schema.get("title") not in _TOOL_ACTIONS:
            return []
        listed = await client.step({"type": "list_tools"})
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool.get("input_schema", {}),
                },
            }
            for tool in listed.observation["tools"]
        ]

    def _actions(self, answer: dict[str, Any], tools: Sequence[Any]) -> Any:
        """Yield the actions of an answer, or why one cannot be read, and the message that responds to it."""
        if not tools:
            yield self._action(answer.get("content") or ""), _user_message
            return
        for call in answer["tool_calls"]:

            def respond(text: str, of: str = call["id"]) -> dict[str, Any]:
                return {"role": "tool", "tool_call_id": of, "content": text}

            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError as error:
                yield f"the arguments are not JSON: {error}", respond
                continue
            yield (
                {"type": "call_tool", "tool_name": call["function"]["name"], "arguments": arguments},
                respond,
            )

    def _action(self, text: str) -> dict[str, Any] | str:
        """Return the action that a text describes, or why there is none."""
        required = self._schema.get("required", [])
        fields = self._schema.get("properties", {})
        try:
            action = json.loads(text)
        except ValueError:
            action = text.strip()

        if not isinstance(action, dict):
            if len(required) != 1:
                named = ", ".join(required) or "the fields of its schema"
                return f"the action must be a JSON object with {named}"
            action = {required[0]: action}
            # A number that stands for a text is this text.
            if fields.get(required[0], {}).get("type") == "string":
                action = {required[0]: text.strip()}
        if (error := best_match(Draft202012Validator(self._schema).iter_errors(action))) is not None:
            return f"the action is refused: {'.'.join(map(str, error.path))} {error.message}"
        return action

    def _instructions(self) -> list[dict[str, str]]:
        fields = {
            name: kind for name, kind in self._schema.get("properties", {}).items() if name != "metadata"
        }
        if self._schema.get("title") in _TOOL_ACTIONS or len(fields) == 1:
            return []
        shown = json.dumps({"properties": fields, "required": self._schema.get("required", [])})
        return [{"role": "system", "content": f"Answer with one JSON object with this schema: {shown}"}]


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncGenerator[OpenEnvEnvironment]:
    own = {"num_sessions": 1, "reset": {}}
    settings = {key: arguments.get(key, default) for key, default in own.items()}
    rest = {key: value for key, value in arguments.items() if key not in own}
    async with _server(name, rest) as url, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"{url}/schema")
        answer.raise_for_status()
        yield OpenEnvEnvironment(name, url, answer.json()["action"], **settings)


@asynccontextmanager
async def _server(name: str, arguments: Mapping[str, Any]) -> AsyncGenerator[str]:
    if name.startswith(("http://", "https://")):
        yield name.rstrip("/")
    elif ":" in name:
        listening = socket.create_server(("127.0.0.1", 0))
        async with served(_application(name), listening):
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    else:
        client = await GenericEnvClient.from_env(name, **arguments)
        async with client:
            yield client.base_url


def _application(reference: str) -> Any:
    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _message(observation: Mapping[str, Any]) -> dict[str, Any]:
    return _user_message(_text(observation))


def _user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _text(observation: Mapping[str, Any]) -> str:
    """Return what the model reads of an observation: its only text, or JSON."""
    shown = {name: value for name, value in observation.items() if name not in _OF_STEPS}
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown)
