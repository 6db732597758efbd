"""SGLang's HTTP server in a separate process.

It is reached over loopback or the given address, with a key generated for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import aiohttp

from megarl.machine.errors import EngineDeadError
from megarl.machine.reaper import children_of_all, descendants, end_held, has_ended, hold
from megarl.rollout.sglang.backend import Backend, CallRefusedError, LastWords

# Requests that have the same effect if the server receives them twice. Sending weights or generating is not
# idempotent.
_REPEATABLE = frozenset(
    {
        "abort_request",
        "continue_generation",
        "flush_cache",
        "health_generate",
        "pause_generation",
        "update_weight_version",
    }
)
_NUM_ATTEMPTS = 4
_FIRST_WAIT_S = 0.1  # doubled after every attempt
_OK = 200
_END_LIMIT_S = 10.0


class ServerBackend(Backend):
    """Backend with a server process.

    No connection to it is reused. The server closes an idle one after a few seconds, and a request that is
    sent at that moment fails although the engine is healthy; a new connection over loopback costs a fraction
    of a millisecond.

    Args:
        start_limit_s: Time limit until the process serves.
    """

    def __init__(self, server_args: dict[str, Any], host: str, start_limit_s: float) -> None:
        self._server_args = server_args
        self._host = host
        self._start_limit_s = start_limit_s
        self.api_key = secrets.token_urlsafe(32)
        self._port = 0  # any free one
        self._children: dict[int, int] = {}  # descriptors of the server's child processes, by pid

    def start(self) -> None:
        """Start the process. After `stop`, it serves at the same URL with the same key again."""
        self._last_words = LastWords()
        ready, ready_fd = os.pipe()

        # Redirect stdout to stderr, to keep SGLang's output out of the worker's own standard output.
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore::UserWarning", "-m", "megarl.rollout.sglang.server_process"],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[ready_fd],
        )
        # Close this end here, or the pipe would stay open after the server has ended.
        os.close(ready_fd)
        settings = {
            "server_args": self._server_args,
            "host": self._host,
            "port": self._port,
            "api_key": self.api_key,
            "ready_fd": ready_fd,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()

        # The server answers when it is ready; an empty line means that it ended or is too slow.
        with os.fdopen(ready) as pipe:
            answered, _, _ = select.select([pipe], [], [], self._start_limit_s)
            answer = pipe.readline() if answered else ""

        if not answer:
            words = self._last_words.read()
            self.stop()
            why = words or (
                "it ended without any output"
                if answered
                else f"it did not serve within {self._start_limit_s:g} s"
            )
            raise EngineDeadError(f"SGLang's server did not start: {why}")

        self._port = json.loads(answer)["port"]
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"
        # Only the children are watched, because other descendants come and go.
        for pid in children_of_all().get(self._process.pid, []):
            self._children.update((pid, descriptor) for descriptor in hold([pid]))

    async def open(self) -> None:
        # There is no total limit: generation may take any time, and the engine's health is checked elsewhere.
        self._session = aiohttp.ClientSession(
            self.url,
            headers={"Authorization": f"Bearer {self.api_key}"},
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        is_ok, answer = await self._ask("generate", payload)
        if not is_ok:
            raise ValueError(_message(answer))
        return json.loads(answer)

    async def call(self, endpoint: str, payload: dict[str, Any]) -> None:
        is_ok, answer = await self._ask(endpoint, _as_json(payload))
        if not is_ok:
            raise CallRefusedError(f"{endpoint}: {_message(answer)}")

    async def flush_cache(self) -> bool:
        is_ok, _ = await self._ask("flush_cache")
        return is_ok

    async def abort(self, names: Collection[str] | None) -> None:
        for body in [{"abort_all": True}] if names is None else [{"rid": name} for name in names]:
            await self.call("abort_request", body)

    async def is_responsive(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                is_ok, _ = await self._ask("health_generate", method="GET")
        except (TimeoutError, EngineDeadError):
            return False
        return is_ok

    async def _ask(
        self, endpoint: str, payload: dict[str, Any] | None = None, *, method: str = "POST"
    ) -> tuple[bool, str]:
        """Return whether the server could do it, and its answer. Raises EngineDeadError if there is none."""
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, _NUM_ATTEMPTS + 1):
            try:
                async with self._session.request(method, f"/{endpoint}", json=payload) as response:
                    return response.status == _OK, await response.text()
            except aiohttp.ClientError as error:
                if attempt == _NUM_ATTEMPTS or not _can_repeat(endpoint, error):
                    why = str(error) or type(error).__name__
                    raise EngineDeadError(
                        f"the connection to SGLang's server broke (/{endpoint}): {why}"
                    ) from error
            await asyncio.sleep(wait_s)
            wait_s *= 2

        raise AssertionError("the last attempt returns or raises")

    def dead_process(self) -> str | None:
        code = self._process.poll()
        ended = None if code is None else f"the server, process {self._process.pid}, ended with code {code}"

        for pid, descriptor in self._children.items():
            if ended is None and has_ended(descriptor):
                ended = f"process {pid} of the server ended"

        return None if ended is None else self._last_words.append_to(ended)

    def process_ids(self) -> list[int]:
        return [self._process.pid, *self._children]

    async def close(self) -> None:
        await self._session.close()

    def stop(self) -> None:
        """End the server: its standard input is closed, and it ends with its child processes.

        Processes that are too slow are killed.
        """
        assert self._process.stdin is not None
        # List the descendants now: after the server's end they can no longer be found through it.
        started = hold(descendants(self._process.pid)) if self._process.poll() is None else []
        self._process.stdin.close()

        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

        end_held([*self._children.values(), *started], _END_LIMIT_S)
        self._children = {}
        self._last_words.close()


def _as_json(payload: dict[str, Any]) -> dict[str, Any]:
    """Encode lists of bytes as base64, the format of the server's request classes."""
    return {
        name: [base64.b64encode(item).decode() if isinstance(item, bytes) else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in payload.items()
    }


def _message(answer: str) -> str:
    """Return the server's description of an error, which its endpoints return in several shapes."""
    try:
        parsed = json.loads(answer)
    except json.JSONDecodeError:
        return answer

    if not isinstance(parsed, dict):
        return answer
    error = parsed.get("error")
    nested = error.get("message") if isinstance(error, dict) else error
    return str(parsed.get("message") or nested or answer)


def _can_repeat(endpoint: str, error: aiohttp.ClientError) -> bool:
    """Whether the request was certainly not sent, or has the same effect when it is received twice."""
    if isinstance(error, aiohttp.ClientConnectorError):
        # Nothing is listening: the server has ended, and waiting would only delay its replacement.
        return not isinstance(error.os_error, ConnectionRefusedError)
    return endpoint in _REPEATABLE
