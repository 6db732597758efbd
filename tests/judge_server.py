"""A server with OpenAI's chat completions API, whose replies and faults a test defines by the prompt."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


class JudgeServer:
    """The server.

    Attributes:
        replies: What the judge writes, by the last line of the prompt.
        faults: By the last line of the prompt, what happens at each of the first requests: a status, `drop`,
            `hang`, or the JSON of a reply.
        models: The names in its list of models; None: it has no such list.
        bodies: The bodies of all requests.
        most_at_once: The most requests that were handled at the same time.
    """

    def __init__(self) -> None:
        self.replies: dict[str, str] = {}
        self.faults: dict[str, list[Any]] = {}
        self.models: list[str] | None = None
        self.retry_after: str | None = "0"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_requests: Counter[str] = Counter()
        self.most_at_once = 0
        self._at_once = 0
        self.url = ""

    def reset(self) -> None:
        url = self.url
        self.__init__()  # type: ignore[misc]
        self.url = url

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        line = body["messages"][-1]["content"].splitlines()[-1]
        number = self.num_requests[line]
        self.num_requests[line] += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)

        try:
            await asyncio.sleep(0.001)
            faults = self.faults.get(line, [])
            return await self._fault(faults[number]) if number < len(faults) else self._completion(line)
        finally:
            self._at_once -= 1

    async def list_models(self) -> Response:
        if self.models is None:
            return Response("not found", 404)
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    def _completion(self, line: str) -> Response:
        message = {"role": "assistant", "content": self.replies[line]}
        return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async def _fault(self, fault: Any) -> Response:
        if fault == "hang":
            await asyncio.sleep(30)
        if fault == "drop":
            return StreamingResponse(iter([b"{"]), headers={"Content-Length": "100"})
        if isinstance(fault, int):
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return Response(f"fault\n{fault}", fault, headers)
        return JSONResponse(fault)


@contextlib.contextmanager
def serve_judge(host: str = "127.0.0.1") -> Iterator[JudgeServer]:
    judge = JudgeServer()
    app = FastAPI()
    app.add_api_route("/v1/chat/completions", judge.answer, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", judge.list_models, methods=["GET"], response_model=None)

    with socket.create_server((host, 0)) as listening:
        judge.url = f"http://{host}:{listening.getsockname()[1]}/v1"
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield judge
        server.should_exit = True
        thread.join(timeout=10)
