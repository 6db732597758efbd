"""Episodes of agents that run elsewhere: a client claims an episode, plays it, and ends it."""

from __future__ import annotations

import asyncio
import hmac
import os
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from megarl.endpoint.api_error import ApiError
from megarl.endpoint.harness import HarnessError, HarnessFailure
from megarl.endpoint.request_fields import bearer_key, json_body
from megarl.endpoint.session import AgentSession
from megarl.endpoint.session_access import environment_of, record_reward, task_fields

KEY_VARIABLE = "MEGARL_ENDPOINT_KEY"
_SHORTEST_KEY = 16
_CLAIM_S = 20.0  # the longest wait of a claim for an episode


class _Episode:
    """An episode that waits for a client, or is played by one."""

    def __init__(self, session: AgentSession, url: str) -> None:
        self.session = session
        self.url = url
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ExternalHarness:
    """Offers each episode to the next client that claims one with the run's key.

    Raises:
        ValueError: The environment variable with the key is missing, or the key is short.
    """

    def __init__(self) -> None:
        self._key = os.environ.get(KEY_VARIABLE, "")
        if len(self._key) < _SHORTEST_KEY:
            raise ValueError(
                f"agent.harness.external needs a key of {_SHORTEST_KEY} or more characters in the "
                f"environment variable {KEY_VARIABLE}; it has {len(self._key)}"
            )
        self._offered: asyncio.Queue[_Episode] = asyncio.Queue()
        self._claimed: dict[str, _Episode] = {}

    async def run(self, session: AgentSession, url: str) -> None:
        episode = _Episode(session, url)
        self._offered.put_nowait(episode)
        try:
            await episode.result
        finally:
            episode.result.cancel()
            self._claimed.pop(session.key, None)

    def add_routes(self, app: FastAPI) -> None:
        """Add `POST /sessions`, which claims an episode, and `POST /session/end`."""

        @app.post("/sessions")
        async def claim(request: Request) -> Response:
            # The time that the comparison takes must not depend on the key.
            if not hmac.compare_digest(bearer_key(request).encode(), self._key.encode()):
                raise ApiError(
                    f"the key is not that of the run, {KEY_VARIABLE}", status=401, code="invalid_api_key"
                )

            episode = None
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLAIM_S):
                    episode = await self._next(request)
            if episode is None:
                return Response(status_code=204)

            self._claimed[episode.session.key] = episode
            content = {
                "environment": environment_of(episode.url, episode.session),
                "task": task_fields(episode.session.task),
            }
            return JSONResponse(content)

        @app.post("/session/end")
        async def end(request: Request) -> dict[str, Any]:
            episode = self._claimed.get(bearer_key(request))
            if episode is None or episode.result.done():
                raise ApiError("no episode of this key is open", status=401, code="invalid_api_key")

            body = await json_body(request)
            given = {name: body[name] for name in ("reward", "responses") if body.get(name) is not None}
            if given:
                record_reward(episode.session, given)
            if body.get("error") is not None:
                why = str(body["error"])
                episode.result.set_exception(HarnessError(HarnessFailure.reported, why))
            else:
                episode.result.set_result(None)
            return {"reward": episode.session.reward}

    async def _next(self, request: Request) -> _Episode | None:
        """Return the next episode that is still open, or None if the client has gone."""
        while not await request.is_disconnected():
            with suppress(TimeoutError):
                episode = await asyncio.wait_for(self._offered.get(), timeout=0.2)
                if not episode.result.done():
                    return episode
        return None
