"""HTTP client of SGLang's server: one connection per request, and retries only where they are safe."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import aiohttp

from megarl.machine.errors import EngineDeadError

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


class ServerAnswer(NamedTuple):
    status: int
    text: str

    @property
    def ok(self) -> bool:
        return self.status == _OK

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def message(self) -> str:
        """The server's description of an error, which its endpoints return in several shapes."""
        try:
            answer = self.json()
        except json.JSONDecodeError:
            return self.text

        if not isinstance(answer, dict):
            return self.text
        error = answer.get("error")
        nested = error.get("message") if isinstance(error, dict) else error

        return str(answer.get("message") or nested or self.text)


class ServerClient:
    """Client of a server on this machine. Must be created and used in a running event loop.

    No connection is reused. The server closes an idle one after a few seconds, and a request that is sent at
    that moment fails although the engine is healthy; a new connection over loopback costs a fraction of a
    millisecond.
    """

    def __init__(self, url: str, key: str) -> None:
        # There is no total limit: generation may take any time, and the engine's health is checked elsewhere.
        self._session = aiohttp.ClientSession(
            url,
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def post(self, endpoint: str, payload: dict[str, Any] | None = None) -> ServerAnswer:
        """Return the answer, whatever its status. Raises EngineDeadError if there is none."""
        return await self._ask("POST", endpoint, payload)

    async def get(self, endpoint: str) -> ServerAnswer:
        """Same as `post`, for a GET request."""
        return await self._ask("GET", endpoint, None)

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, endpoint: str, payload: dict[str, Any] | None) -> ServerAnswer:
        wait_s = _FIRST_WAIT_S
        for attempt in range(1, _NUM_ATTEMPTS + 1):
            try:
                async with self._session.request(method, f"/{endpoint}", json=payload) as response:
                    return ServerAnswer(response.status, await response.text())
            except aiohttp.ClientError as error:
                if attempt == _NUM_ATTEMPTS or not _can_repeat(endpoint, error):
                    why = str(error) or type(error).__name__
                    raise EngineDeadError(
                        f"the connection to SGLang's server broke (/{endpoint}): {why}"
                    ) from error
            await asyncio.sleep(wait_s)
            wait_s *= 2

        raise AssertionError("the last attempt returns or raises")


def _can_repeat(endpoint: str, error: aiohttp.ClientError) -> bool:
    """Whether the request was certainly not sent, or has the same effect when it is received twice."""
    if isinstance(error, aiohttp.ClientConnectorError):
        # Nothing is listening: the server has ended, and waiting would only delay its replacement.
        return not isinstance(error.os_error, ConnectionRefusedError)
    return endpoint in _REPEATABLE
