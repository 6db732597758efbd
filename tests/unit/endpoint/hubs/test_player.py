"""Test how the process of a hub reaches the model, without a hub."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megarl.endpoint.hubs.player import EpisodeLimitError, PlayerEndpoint


class Model(BaseHTTPRequestHandler):
    """Answers with what the last message asks for: an answer, an error with a code, or nothing."""

    asked = threading.Event()
    left = threading.Event()
    seen: list[Any] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers["Authorization"], body))
        text = body["messages"][-1]["content"]
        if text == "wait":
            self.asked.set()
            self.rfile.read(1)  # until the client disconnects
            self.left.set()
            return

        answer: Any = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        if text.startswith("refuse"):
            answer = {"error": {"message": "no", "code": text.partition(" ")[2]}}
        content = json.dumps(answer).encode()
        self.send_response(400 if "error" in answer else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayerEndpoint]:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing answers
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield PlayerEndpoint(f"http://127.0.0.1:{server.server_port}/v1", "sk-episode")
    server.shutdown()
    server.server_close()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_model_answers_without_a_proxy_or_says_why_not(endpoint: PlayerEndpoint) -> None:
    assert asyncio.run(endpoint.chat(user("hi"))) == {"role": "assistant", "content": "hi"}
    assert Model.seen[-1] == (
        "/v1/chat/completions",
        "Bearer sk-episode",
        {"model": "policy", "messages": user("hi")},
    )
    for code in ("episode_limit", "context_length_exceeded"):
        with pytest.raises(EpisodeLimitError, match="no"):
            asyncio.run(endpoint.chat(user(f"refuse {code}")))
    with pytest.raises(ValueError, match="no"):
        asyncio.run(endpoint.chat(user("refuse wrong")))


def test_the_request_of_an_episode_that_is_over_is_disconnected(endpoint: PlayerEndpoint) -> None:
    async def give_up() -> None:
        asking = asyncio.ensure_future(endpoint.chat(user("wait")))
        await asyncio.to_thread(Model.asked.wait, 30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(give_up())
    assert Model.left.wait(30)
