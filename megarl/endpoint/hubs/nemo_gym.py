"""Environments of NeMo Gym: a resources server, whose tools and verifier the simple agent of NeMo Gym uses.

The name is that of a folder in `resources_servers`, such as `mcqa`, or a module with a server of your own.
The server runs here, without the head server and without Ray. Arguments are the fields of its configuration,
and:

- `data`: a file of rows in NeMo Gym's format; by default, the server's `data/example.jsonl`;
- `max_steps`: turns of the model in an episode.

Servers that call models of their own, such as judges, are not supported.
"""

from __future__ import annotations

import importlib
import json
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http.cookies import SimpleCookie
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import yaml
from fastapi import Response
from megarl_player import served
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.config_types import BaseServerConfig, ModelServerRef, ResourcesServerRef
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming
from nemo_gym.server_utils import (
    GlobalAIOHTTPAsyncClientConfig,
    ServerClient,
    get_response_json,
    raise_for_status,
    set_global_aiohttp_client,
)
from omegaconf import OmegaConf
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

_SERVER = "resources"
_MODEL = "policy_model"
_HOST = "127.0.0.1"


class _EpisodeClient(ServerClient):
    """Finds the servers of an episode, and sends the key of its session to the model's."""

    api_key: str

    async def request(self, server_name: str, url_path: str, method: str, **options: Any) -> Any:
        if server_name == _MODEL:
            options["headers"] = {"Authorization": f"Bearer {self.api_key}"}
        return await super().request(server_name, url_path, method, **options)


class NemoGymEnvironment:
    def __init__(self, name: str, port: int, data: Path, max_steps: int | None) -> None:
        self._name = name
        self._port = port
        self._data = data
        self._max_steps = max_steps

    async def rows(self, size: int, seed: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the rows of the data, shuffled."""
        lines = [line for line in self._data.read_text(encoding="utf-8").splitlines() if line.strip()]
        random.Random(seed).shuffle(lines)
        for line in lines[:size]:
            row = json.loads(line)
            truth = row.get("expected_answer", row.get("answer", ""))
            yield {
                "prompt": _messages(row["responses_create_params"]["input"]),
                "data_source": f"nemo_gym/{self._name}",
                "reward_model": {"style": "rule", "ground_truth": str(truth)},
                "extra_info": {"row": line},
            }

    async def play(self, task: dict[str, Any], endpoint: Any) -> tuple[float, dict[str, float]]:
        row = json.loads(task["extra_info"]["row"])
        client = _client(self._port, endpoint)
        agent = SimpleAgent(
            config=SimpleAgentConfig(
                host=_HOST,
                port=0,
                entrypoint="app.py",
                name="agent",
                resources_server=ResourcesServerRef(type="resources_servers", name=_SERVER),
                model_server=ModelServerRef(type="responses_api_models", name=_MODEL),
                **({} if self._max_steps is None else {"max_steps": self._max_steps}),
            ),
            server_client=client,
        )

        # These are the three calls of the agent's own `run`, of which the second needs no server here.
        seeded = await client.post(server_name=_SERVER, url_path="/seed_session", json=row)
        await raise_for_status(seeded)
        params = NeMoGymResponseCreateParamsNonStreaming.model_validate(
            {"model": "policy", **row["responses_create_params"]}
        )
        given = Response()
        answer = await agent.responses(SimpleNamespace(cookies=seeded.cookies), given, params)
        verified = await client.post(
            server_name=_SERVER,
            url_path="/verify",
            json={**row, "response": answer.model_dump()},
            cookies=_cookies(seeded.cookies, given),
        )
        await raise_for_status(verified)
        result = await get_response_json(verified)
        metrics = {name: value for name, value in result.items() if name not in row and name != "reward"}
        return result["reward"], metrics


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncGenerator[NemoGymEnvironment]:
    module = importlib.import_module(name if "." in name else f"resources_servers.{name}.app")
    folder = Path(str(module.__file__)).parent
    values = {key: value for key, value in arguments.items() if key not in ("data", "max_steps")}
    data = Path(arguments.get("data", folder / "data" / "example.jsonl"))

    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig())
    kind = _server_class(module)
    config = kind.model_fields["config"].annotation.model_validate(
        {**_defaults(folder, name), **values, "host": _HOST, "port": port, "name": _SERVER}
    )
    server = kind(config=config, server_client=_client(port, None))
    async with served(server.setup_webserver(), listening):
        yield NemoGymEnvironment(name, port, data, arguments.get("max_steps"))


def _client(port: int, endpoint: Any) -> _EpisodeClient:
    places = {_SERVER: {"host": _HOST, "port": port}}
    if endpoint is not None:
        url = urlsplit(endpoint.base_url)
        places[_MODEL] = {"host": str(url.hostname), "port": int(url.port or 80)}
    return _EpisodeClient(
        head_server_config=BaseServerConfig(host=_HOST, port=0),
        global_config_dict=OmegaConf.create({name: {"type": {"name": at}} for name, at in places.items()}),
        api_key="" if endpoint is None else endpoint.api_key,
    )


def _server_class(module: ModuleType) -> Any:
    own = [
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, SimpleResourcesServer)
        and each.__module__ == module.__name__
    ]
    if not own:
        raise ValueError(f"{module.__name__} has no subclass of SimpleResourcesServer")
    return own[-1]


def _defaults(folder: Path, name: str) -> Mapping[str, Any]:
    """Return the server's fields in the configuration that it is shipped with."""
    file = folder / "configs" / f"{name}.yaml"
    if not file.exists():
        return {"entrypoint": "app.py"}
    for section in yaml.safe_load(file.read_text(encoding="utf-8")).values():
        for fields in section.get("resources_servers", {}).values():
            return fields
    return {"entrypoint": "app.py"}


def _messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [
        {"role": "system" if each["role"] == "developer" else each["role"], "content": each["content"]}
        for each in given
    ]


def _cookies(seeded: Mapping[str, Any], given: Response) -> dict[str, str]:
    """Return the cookies of the session after the tools of an episode."""
    cookies = {name: morsel.value for name, morsel in seeded.items()}
    for header in given.headers.getlist("set-cookie"):
        cookies |= {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    return cookies
