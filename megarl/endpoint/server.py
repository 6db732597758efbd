"""The HTTP server of the sessions of a process. A request names its session by the session's key."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from megarl.agents.trajectory import EpisodeEnd
from megarl.endpoint import anthropic_messages, openai_chat, openai_responses
from megarl.endpoint.api_error import ApiError
from megarl.endpoint.harness import record_reward, task_fields
from megarl.endpoint.request_fields import ConversationFields, TurnReply, read_query
from megarl.endpoint.session import AgentSession, TurnPlan
from megarl.machine.background import in_background
from megarl.machine.ports import hold_port
from megarl.machine.strict_json import load_strictly

MODEL = "policy"  # the name under which the model is listed; requests may use any other
_ALIVE_S = 10.0  # between two comments in a stream that waits for the model
# Clients close idle connections first (httpx after 5 s). If the server did, a request that is sent at that
# moment would fail.
_KEEP_ALIVE_S = 3600
_CLIENT_GONE = 499  # nginx's status, which no client reads

Body = Mapping[str, Any]


# How each API writes a request, a whole answer, and a streamed one.
_APIS: Mapping[
    str,
    tuple[
        type[ConversationFields],
        Callable[[Body, TurnReply], dict[str, Any]],
        Callable[[Body, TurnReply], Iterator[str]],
    ],
] = {
    "/v1/chat/completions": (openai_chat.ChatRequest, openai_chat.completion, openai_chat.chunks),
    "/v1/messages": (
        anthropic_messages.MessagesRequest,
        anthropic_messages.message,
        anthropic_messages.events,
    ),
    "/v1/responses": (
        openai_responses.ResponsesRequest,
        openai_responses.response,
        openai_responses.events,
    ),
}


_LARGE = 1 << 14  # bytes; the tokens of smaller bodies take a few milliseconds
_MOST_THREADS = 2  # large bodies that are processed at the same time


class BodyTooLargeError(ApiError):
    """A body is larger than any conversation of the run."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            f"the body has more than {max_bytes} bytes, too many for a conversation of "
            "data.max_prompt_length + data.max_response_length tokens. Please reduce the "
            "length of the messages.",
            status=413,
            code="context_length_exceeded",
        )


class RequestBodies:
    """Reads and processes the bodies that a server receives.

    Args:
        max_bytes: Size of the largest body that is accepted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._threads = asyncio.Semaphore(_MOST_THREADS)

    async def process[Result](self, request: Request, work: Callable[[dict[str, Any]], Result]) -> Result:
        """Return the result of `work` for the JSON object that a request contains.

        For a large body, parsing and `work` run in a thread, so that other requests are answered meanwhile.

        Raises:
            BodyTooLargeError: It was not parsed.
            ApiError: It is not a JSON object.
        """
        body = await self._read(request)
        if len(body) < _LARGE:
            return work(_parsed(body))

        async with self._threads:
            return await asyncio.wrap_future(in_background(lambda: work(_parsed(body)), "large body"))

    async def _read(self, request: Request) -> bytes:
        """Return the body of a request. The server receives and drops the rest of one that is too large."""
        if int(request.headers.get("content-length", 0)) > self._max_bytes:
            raise BodyTooLargeError(self._max_bytes)

        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_bytes:
                raise BodyTooLargeError(self._max_bytes)
        return bytes(body)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = load_strictly(body)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    return parsed


def bearer_key(request: Request) -> str:
    """Return the key of a request, from the header of either API."""
    headers = request.headers
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")


async def disconnected(request: Request) -> None:
    """Wait until the client disconnects. The body of the request must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def build_app(
    sessions: Mapping[str, AgentSession], ignored: Collection[str], bodies: RequestBodies
) -> FastAPI:
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
        schema, whole, events = _APIS[request.url.path]
        session = _session_of(request, sessions)

        def read(body: Body) -> tuple[Body, TurnPlan]:
            return body, session.plan(read_query(schema, body, ignored))

        try:
            body, plan = await bodies.process(request, read)
        except BodyTooLargeError:
            session.limit = session.limit or EpisodeEnd.length
            raise
        # Refusals have a status of their own, so all of them come before a stream begins.
        answering = session.answer(plan)
        if body.get("stream"):
            written = _written(answering, lambda reply: events(body, reply))
            return _EventStream(session, answering, written)
        reply = await _while_connected(request, session, answering)
        return Response(status_code=_CLIENT_GONE) if reply is None else JSONResponse(whole(body, reply))

    for path in _APIS:
        app.add_api_route(path, complete, methods=["POST"])

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        session = _session_of(request, sessions)

        def count(body: Body) -> int:
            query = read_query(anthropic_messages.MessagesRequest, body, ignored)
            return len(session.plan(query).token_ids)

        return {"input_tokens": await bodies.process(request, count)}

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
        record_reward(session, await bodies.process(request, dict))
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
    session.has_client = True
    return session


async def _while_connected(
    request: Request, session: AgentSession, answering: asyncio.Task[TurnReply]
) -> TurnReply | None:
    """Return the answer, or None if the client disconnects first."""
    # Polling for this would take a fifth of a core with 200 waiting requests.
    disconnecting = asyncio.ensure_future(disconnected(request))

    try:
        await asyncio.wait({answering, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        session.abandon()
        return None
    finally:
        answering.cancel()
        disconnecting.cancel()


class _EventStream(StreamingResponse):
    """A streamed answer. If its client disconnects first, the answer is cancelled."""

    def __init__(
        self, session: AgentSession, answering: asyncio.Task[TurnReply], events: AsyncIterator[str]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._session = session
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The client may disconnect before the first event is requested, so the events cannot do this.
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._answering.done():
                self._session.abandon()
            self._answering.cancel()


async def _written(
    answering: asyncio.Task[TurnReply], events: Callable[[TurnReply], Iterator[str]]
) -> AsyncIterator[str]:
    # Comments keep the connection alive. The answer is sent when it is complete.
    while not (await asyncio.wait({answering}, timeout=_ALIVE_S))[0]:
        yield ": waiting for the model\n\n"
    for event in events(answering.result()):
        yield event


class _Protocol(H11Protocol):
    """Calls `request.state.on_reset` of the last request if the client resets the connection.

    The system of a client that ends does so if the client has not read everything that was sent to it.
    """

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(exc, ConnectionError) and self.scope is not None:
            self.scope["state"].get("on_reset", lambda: None)()


class _Server(uvicorn.Server):
    """A server that leaves signals to its process.

    uvicorn would wait for open requests after a SIGTERM.
    """

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


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
            http=_Protocol,
            log_level=logging.WARNING,
            lifespan="off",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Server(config)
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
