"""Episodes of agents that run elsewhere: a client claims an episode, plays it, and ends it."""

from __future__ import annotations

import asyncio
import hmac
import os
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from megarl.endpoint.api_error import ApiError
from megarl.endpoint.harness import (
    HarnessError,
    HarnessFailure,
    RewardFields,
    environment_of,
    record_reward,
    task_fields,
)
from megarl.endpoint.request_fields import checked
from megarl.endpoint.server import RequestBodies, bearer_key, disconnected
from megarl.endpoint.session import AgentSession

KEY_VARIABLE = "MEGARL_ENDPOINT_KEY"
_SHORTEST_KEY = 16
_CLAIM_S = 20.0  # the longest wait of a claim for an episode
_CALLBACKS = 10


class _EndFields(RewardFields):
    error: str | None = None


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

    async def __call__(self, session: AgentSession, url: str) -> None:
        episode = _Episode(session, url)
        self._offered.put_nowait(episode)
        try:
            await episode.result
        finally:
            episode.result.cancel()
            self._claimed.pop(session.key, None)

    def add_routes(self, app: FastAPI, bodies: RequestBodies) -> None:
        """Add `POST /sessions`, which claims an episode, and `POST /session/end`."""

        @app.post("/sessions")
        async def claim(request: Request) -> Response:
            # The time that the comparison takes must not depend on the key.
            if not hmac.compare_digest(bearer_key(request).encode(), self._key.encode()):
                raise ApiError(
                    f"the key is not that of the run, {KEY_VARIABLE}", status=401, code="invalid_api_key"
                )

            episode = await self._next(request)
            if episode is None:
                return Response(status_code=204)

            self._claimed[episode.session.key] = episode
            request.state.on_reset = partial(self._offer_again, episode)
            content = {
                "environment": environment_of(episode.url, episode.session),
                "task": task_fields(episode.session.task),
            }
            return JSONResponse(content)

        @app.post("/session/end")
        async def end(request: Request) -> dict[str, Any]:
            episode = self._claimed.get(bearer_key(request))
            if episode is None or episode.result.done():
                raise _not_open()

            body = await bodies.process(request, dict)
            if episode.result.done():
                raise _not_open()
            why = checked(_EndFields, body).error
            if body.get("reward") is not None or body.get("responses") is not None:
                record_reward(episode.session, body)
            if why is not None:
                episode.result.set_exception(HarnessError(HarnessFailure.reported, why))
            else:
                episode.result.set_result(None)
            return {"reward": episode.session.reward}

    async def _next(self, request: Request) -> _Episode | None:
        """Return the next episode, or None if there is none or the client has gone."""
        getting = asyncio.ensure_future(self._next_open())
        disconnecting = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait(
                {getting, disconnecting}, timeout=_CLAIM_S, return_when=asyncio.FIRST_COMPLETED
            )
            # The end of a connection that has arrived by now passes through some callbacks until it is known.
            for _ in range(_CALLBACKS):
                await asyncio.sleep(0)

            if not getting.done():
                return None
            if disconnecting.done():
                self._offered.put_nowait(getting.result())
                return None
            return getting.result()
        finally:
            getting.cancel()
            disconnecting.cancel()

    def _offer_again(self, episode: _Episode) -> None:
        """Offer an episode whose client has ended before it read which one it claimed."""
        if not episode.result.done() and not episode.session.has_client:
            del self._claimed[episode.session.key]
            self._offered.put_nowait(episode)

    async def _next_open(self) -> _Episode:
        """Return the next episode that has not ended while it waited."""
        while (episode := await self._offered.get()).result.done():
            pass
        return episode


def _not_open() -> ApiError:
    return ApiError("no episode of this key is open", status=401, code="invalid_api_key")
