"""Plays the episodes of a hub's environment, in a Python environment that has the hub's package.

A run starts this file as a program, because the packages of hubs require other versions of libraries than
megarl does. The Python environment need not have megarl: this file and the adapters next to it import the
standard library and the hub only (and `megarl_player`, which is this file). Messages are lines of JSON:

    the run, on standard input               the player, on standard output
    {"name", "arguments"}               ->   {"version"}, {"is_missing": true} or {"error"}
    {"episode", "task", "endpoint"}     ->   {"episode", "reward", "metrics"} or {"episode", "error"}
    {"episode", "is_over": true}        ->
    {"size", "seed"}                    ->   {"row"} for each row, then {"num_rows"} or {"error"}

An adapter is a module with an asynchronous context manager `open_environment(name, arguments)`. What it opens
has two methods: `rows(size, seed)` yields rows of data, each with what the environment needs to find its task
in `extra_info`, and `play(task, endpoint)` plays an episode and returns its reward and its metrics.
"""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import math
import os
import socket
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

_LIMIT_CODES = ("episode_limit", "context_length_exceeded")
_START_S = 60.0  # for a server
_MOST_THREADS = 1024  # a request to the model takes one; they are started as needed


class EpisodeLimitError(Exception):
    """The run allows no further turn in this episode."""


class PlayerEndpoint:
    """The model of an episode, for adapters and for the clients of hubs.

    Attributes:
        base_url: For clients of OpenAI's APIs.
        api_key: The key of the episode.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self.api_key = api_key

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Return the model's answer to a conversation, in the form of OpenAI's chat completions.

        Raises:
            EpisodeLimitError: The episode has no room for a turn.
        """
        body = {"model": "policy", "messages": list(messages), **({"tools": list(tools)} if tools else {})}
        # The endpoint is in the network of the run, which no proxy reaches. This client uses none.
        connection = http.client.HTTPConnection(urlsplit(self.base_url).netloc)
        try:
            answer = await asyncio.to_thread(self._post, connection, "/chat/completions", body)
        except asyncio.CancelledError:
            # The thread waits for the answer. The run stops generating it for a client that disconnects.
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            raise
        return answer["choices"][0]["message"]

    def _post(
        self, connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
    ) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        try:
            connection.request(
                "POST", urlsplit(self.base_url).path + path, json.dumps(body).encode(), headers
            )
            response = connection.getresponse()
            answer = json.load(response)
        finally:
            connection.close()

        if response.status != http.client.OK:
            refused = answer["error"]
            kind = EpisodeLimitError if refused.get("code") in _LIMIT_CODES else ValueError
            raise kind(refused["message"])
        return answer


@asynccontextmanager
async def served(application: Any, listening: socket.socket) -> AsyncGenerator[None]:
    """Serve an ASGI application of a hub in a thread, for a block."""
    import uvicorn  # only hubs with servers have it

    server = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    async with asyncio.timeout(_START_S):
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the server has ended, see its output above")
            await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join)


class _Player:
    """Receives orders and sends reports until the input ends."""

    def __init__(self, environment: Any, reports: TextIO) -> None:
        self._environment = environment
        self._reports = reports
        self._episodes: dict[int, asyncio.Task[None]] = {}

    async def serve(self, orders: AsyncIterator[dict[str, Any]]) -> None:
        async for order in orders:
            if "size" in order:
                await self._report_rows(order["size"], order["seed"])
            elif "task" in order:
                number = order["episode"]
                playing = asyncio.ensure_future(self._play(number, order["task"], order["endpoint"]))
                self._episodes[number] = playing
            elif (playing := self._episodes.get(order["episode"])) is not None:
                playing.cancel()

        # An episode may own processes, which must not outlive it. One that is ending is not interrupted.
        for playing in self._episodes.values():
            if not playing.cancelling():
                playing.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)

    async def _play(self, episode: int, task: dict[str, Any], endpoint: dict[str, str]) -> None:
        _exclude_from_proxies(str(urlsplit(endpoint["base_url"]).hostname))
        report: dict[str, Any]
        try:
            reward, metrics = await self._environment.play(task, PlayerEndpoint(**endpoint))
            numbers = {name: float(value) for name, value in metrics.items() if _is_number(value)}
            report = {"reward": float(reward), "metrics": numbers}
        except Exception as error:  # noqa: BLE001  (the code of a hub may raise anything)
            report = {"error": _described(error)}
        finally:
            self._episodes.pop(episode, None)
        _write(self._reports, episode=episode, **report)

    async def _report_rows(self, size: int, seed: int) -> None:
        count = 0
        try:
            async for row in self._environment.rows(size, seed):
                _write(self._reports, row=row)
                count += 1
        except Exception as error:  # noqa: BLE001  (the code of a hub may raise anything)
            _write(self._reports, error=_described(error))
        else:
            _write(self._reports, num_rows=count)


def _write(reports: TextIO, **values: Any) -> None:
    reports.write(json.dumps(values) + "\n")
    reports.flush()


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)


def _described(error: BaseException) -> str:
    """Return the error with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


async def _lines(given: TextIO) -> AsyncIterator[dict[str, Any]]:
    """Yield the orders of the run. They are read in a thread, as any length is allowed."""
    while line := await asyncio.to_thread(given.readline):
        yield json.loads(line)


def _exclude_from_proxies(host: str) -> None:
    """Let the clients of a hub reach a host directly, whatever proxy the machine has."""
    excluded = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")).split(",")
    if host not in excluded and "*" not in excluded:
        hosts = ",".join([*(each for each in excluded if each), host])
        os.environ.update(NO_PROXY=hosts, no_proxy=hosts)


def _adapter(hub: str) -> Any:
    # A plain import would find this folder's module instead of the hub's package of the same name.
    path = Path(__file__).with_name(f"{hub}.py")
    spec = importlib.util.spec_from_file_location(f"megarl_hub_{hub}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def _main(hub: str, package: str, module: str) -> None:
    # What a hub prints must not be mixed with the reports, and its processes must not read the orders, which
    # contain keys. Processes do not inherit the copies.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    given = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_MOST_THREADS))
    for host in ("127.0.0.1", "localhost"):
        _exclude_from_proxies(host)
    orders = _lines(given)
    asked = await anext(orders)
    if importlib.util.find_spec(module) is None:
        _write(reports, is_missing=True)
        return
    try:
        opening = _adapter(hub).open_environment(asked["name"], asked["arguments"])
        environment = await opening.__aenter__()
    except Exception as error:  # noqa: BLE001  (the code of a hub may raise anything)
        _write(reports, error=_described(error))
        return

    _write(reports, version=metadata.version(package))
    try:
        await _Player(environment, reports).serve(orders)
    finally:
        await opening.__aexit__(None, None, None)


if __name__ == "__main__":
    # Adapters import the errors of this module by its name.
    sys.modules["megarl_player"] = sys.modules["__main__"]
    asyncio.run(_main(*sys.argv[1:]))
