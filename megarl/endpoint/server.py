"""The HTTP server of the sessions of a process. A request names its session by the session's key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from megarl.endpoint import anthropic_messages, openai_chat, openai_responses
from megarl.endpoint.api_error import ApiError
from megarl.endpoint.request_fields import bearer_key, json_body
from megarl.endpoint.session import AgentSession, TurnPlan
from megarl.endpoint.session_access import record_reward, task_fields
from megarl.endpoint.turn_query import TurnQuery, TurnReply
from megarl.machine.ports import hold_port

MODEL = "policy"  # the name under which the model is listed; requests may use any other
_ALIVE_S = 10.0  # between two comments in a stream that waits for the model
# Clients close idle connections first (httpx after 5 s). If the server did, a request that is sent at that
# moment would fail.
_KEEP_ALIVE_S = 3600
_CLIENT_GONE = 499  # nginx's status, which no client reads

Body = Mapping[str, Any]


class _Api(NamedTuple):
    """How one API writes requests and answers."""

    read: Callable[[Body, Collection[str]], TurnQuery]
    whole: Callable[[Body, TurnReply], dict[str, Any]]
    events: Callable[[Body, TurnReply], Iterator[str]]
    error_event: Callable[[ApiError], str]


_APIS = {
    "/v1/chat/completions": _Api(
        openai_chat.read_query, openai_chat.completion, openai_chat.chunks, openai_chat.error_event
    ),
    "/v1/messages": _Api(
        anthropic_messages.read_query,
        anthropic_messages.message,
        anthropic_messages.events,
        anthropic_messages.error_event,
    ),
    "/v1/responses": _Api(
        openai_responses.read_query,
        openai_responses.response,
        openai_responses.events,
        openai_responses.error_event,
    ),
}


def build_app(sessions: Mapping[str, AgentSession], ignored: Collection[str]) -> FastAPI:
    """Build the application.

    Args:
        sessions: The sessions by key. The caller may add and remove sessions at any time.
        ignored: Parameters of requests that are accepted without effect.
    """
    app = FastAPI(openapi_url=None)

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        is_anthropic = request.url.path.startswith("/v1/messages")
        content = error.for_anthropic() if is_anthropic else error.for_openai()
        return JSONResponse(content, status_code=error.status)

    @app.exception_handler(ClientDisconnect)
    async def note_disconnect(request: Request, error: ClientDisconnect) -> Response:
        """Handle a client that disconnects before its request has arrived."""
        session = sessions.get(bearer_key(request))
        if session is not None:  # its episode may have ended
            session.abandon()
        return Response(status_code=_CLIENT_GONE)

    async def complete(request: Request) -> Response:
        api = _APIS[request.url.path]
        session = _session_of(request, sessions)
        body = await json_body(request)
        # Refusals have a status of their own, so all of them come before a stream begins.
        plan = session.plan(api.read(body, ignored))
        if body.get("stream"):
            return StreamingResponse(_stream(api, body, session, plan), media_type="text/event-stream")
        reply = await _while_connected(request, session, session.answer(plan))
        return Response(status_code=_CLIENT_GONE) if reply is None else JSONResponse(api.whole(body, reply))

    for path in _APIS:
        app.add_api_route(path, complete, methods=["POST"])

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        session = _session_of(request, sessions)
        query = anthropic_messages.read_query(await json_body(request), ignored)
        return {"input_tokens": session.num_tokens(query)}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        _session_of(request, sessions)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megarl"}
        return {"object": "list", "data": [model]}

    @app.get("/session/task")
    async def task(request: Request) -> dict[str, Any]:
        return task_fields(_session_of(request, sessions).task)

    @app.post("/session/reward")
    async def reward(request: Request) -> dict[str, Any]:
        session = _session_of(request, sessions)
        record_reward(session, await json_body(request))
        return {"reward": session.reward}

    return app


def _session_of(request: Request, sessions: Mapping[str, AgentSession]) -> AgentSession:
    """Return the session of the request's key. Raises ApiError without such a session."""
    session = sessions.get(bearer_key(request))
    if session is None:
        raise ApiError(
            "no session has this key; use the episode's OPENAI_API_KEY or ANTHROPIC_API_KEY while it runs",
            status=401,
            code="invalid_api_key",
        )
    return session


async def _while_connected(
    request: Request, session: AgentSession, answer: Coroutine[Any, Any, TurnReply]
) -> TurnReply | None:
    """Return the answer, or None if the client disconnects first."""
    answering = asyncio.ensure_future(answer)
    # Polling for this would take a fifth of a core with 200 waiting requests.
    disconnecting = asyncio.ensure_future(_disconnect(request))

    try:
        await asyncio.wait({answering, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        session.abandon()
        return None
    finally:
        answering.cancel()
        disconnecting.cancel()


async def _disconnect(request: Request) -> None:
    """Wait until the client disconnects. The body of the request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(api: _Api, body: Body, session: AgentSession, plan: TurnPlan) -> AsyncIterator[str]:
    answering = asyncio.ensure_future(session.answer(plan))
    try:
        # Comments keep the connection alive. The answer is sent when it is complete.
        while not (await asyncio.wait({answering}, timeout=_ALIVE_S))[0]:
            yield ": waiting for the model\n\n"
        for event in api.events(body, answering.result()):
            yield event
    except ApiError as error:
        yield api.error_event(error)
    except (asyncio.CancelledError, GeneratorExit):
        if not answering.done():
            session.abandon()
        raise
    finally:
        answering.cancel()


class EndpointServer:
    """The server, in the running event loop.

    Attributes:
        url: Its address, without a path.
    """

    def __init__(self, app: FastAPI, host: str, port: int = 0) -> None:
        """Reserve the port.

        Args:
            port: 0: any free port.
        """
        # uvicorn listens on the port that is held here, at one address only.
        self._socket = hold_port(host, port)

        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"

        config = uvicorn.Config(
            app,
            log_level=logging.WARNING,
            lifespan="off",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            with suppress(asyncio.CancelledError):
                await self._serving
