"""Test that large bodies are refused before they are parsed, and delay no other episode and no end of the process."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from megarl.config.schema import AgentConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.rollout.tool_calls import call_format
from tests import fork_server
from tests.unit.endpoint.in_process import InProcess, byte_tokenizer
from tests.unit.endpoint.session_servers import HeldPrograms, Serving

TOKENIZER = byte_tokenizer()
MB = 1 << 20
SMALL = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}).encode()
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/session/reward")


class Connection:
    """A connection to the server, on which bodies are sent in parts."""

    def __init__(self, url: str, key: str) -> None:
        self._address = urlsplit(url)
        self._key = key

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection(self._address.hostname, self._address.port)
        return self

    def close(self) -> None:
        self._writer.close()

    async def begin(self, path: str, num_bytes: int | None) -> None:
        """Send the head of a request. Without a number of bytes, its body is sent in chunks."""
        length = "Transfer-Encoding: chunked" if num_bytes is None else f"Content-Length: {num_bytes}"
        self._writer.write(
            f"POST {path} HTTP/1.1\r\nHost: a\r\nx-api-key: {self._key}\r\n{length}\r\n\r\n".encode()
        )
        await self._writer.drain()

    async def send(self, part: bytes) -> None:
        self._writer.write(part)
        await self._writer.drain()

    async def answer(self) -> tuple[int, Any]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

    async def ask(self, path: str, body: bytes) -> tuple[int, Any]:
        await self.begin(path, len(body))
        await self.send(body)
        return await self.answer()


def test_bodies_far_beyond_the_context_are_refused_while_others_are_answered() -> None:
    async def play() -> None:
        programs = HeldPrograms()
        serving = Serving(programs, TOKENIZER, ChatTokens(TOKENIZER, partial(call_format, AgentConfig())))
        await serving.server.start()
        serving.begin(0)
        serving.begin(1)
        while len(programs.keys) < 2:
            await asyncio.sleep(0.001)

        large = [await Connection(serving.server.url, programs.keys[0]).open() for _ in range(5)]
        other = await Connection(serving.server.url, programs.keys[1]).open()
        for connection, path in zip(large, (*PATHS, PATHS[0]), strict=True):
            await connection.begin(path, None if connection is large[4] else 50 * MB)

        # The first four are refused by their heads alone, and all of them before their bodies end. No body is
        # JSON, but none is parsed.
        refused = [await connection.answer() for connection in large[:4]]
        block = b"x" * MB
        for number in range(50):
            for connection in large[:4]:
                await connection.send(block)
            await large[4].send(f"{MB:x}\r\n".encode() + block + b"\r\n")
            if number == 2:
                refused.append(await large[4].answer())
            if number % 10 == 5:
                assert (await other.ask(PATHS[number // 20], SMALL))[0] in (200, 400)
                assert (await other.ask(PATHS[0], SMALL))[0] == 200
        await large[4].send(b"0\r\n\r\n")

        most = serving.server.max_body_bytes
        for (status, said), path in zip(refused, (*PATHS, PATHS[0]), strict=True):
            assert status == 413
            assert f"more than {most} bytes" in said["error"]["message"]
            expected = "request_too_large" if path == "/v1/messages" else "invalid_request_error"
            assert said["error"]["type"] == expected

        # The connections can be used again.
        for connection in large:
            assert (await connection.ask(PATHS[0], SMALL))[0] == 200
            connection.close()
        other.close()
        programs.release.set()
        await serving.end()
        # The episode ended by its length, as after a conversation that is too long.
        assert [ended.trajectory.end.value for ended in serving.reports] == ["length", "done"]  # type: ignore[union-attr]

    asyncio.run(play())


@pytest.mark.parametrize("max_tokens", [1, 500, 8192])
def test_every_conversation_that_fits_is_accepted(max_tokens: int) -> None:
    tokens = ChatTokens(TOKENIZER, partial(call_format, AgentConfig()))
    most = tokens.max_body_bytes(max_tokens)
    # Characters that JSON may write with twelve bytes, and fields around each of them.
    messages = [{"role": "user", "content": "\U0001f60a", "name": None}] * (max_tokens // 6)
    assert len(json.dumps({"messages": messages}).encode()) < most
    assert most < (1 << 20) + 200 * max_tokens


class WaitingTokens(ChatTokens):
    """Waits with long messages until it is released.

    Attributes:
        begun: Is set when it waits.
    """

    def __init__(self) -> None:
        super().__init__(TOKENIZER, partial(call_format, AgentConfig()))
        self.begun = threading.Event()
        self.release = threading.Event()

    def begin(self, messages: Sequence[dict[str, Any]], tools: Any) -> list[int]:
        if len(messages[-1]["content"]) > 10_000:
            self.begun.set()
            assert self.release.wait(60), "nothing else was answered"
        return super().begin(messages, tools)


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a" * 20_000}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "a" * 20_000}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a" * 20_000}]},
    "/v1/responses": {"input": "a" * 20_000},
}


@pytest.mark.parametrize("path", BODIES)
def test_large_bodies_are_tokenized_beside_other_requests(path: str) -> None:
    async def play() -> None:
        tokens = WaitingTokens()
        server = InProcess(TOKENIZER, ["42"], tokens=tokens)
        large = [asyncio.ensure_future(server.post(path, BODIES[path])) for _ in range(5)]
        while not tokens.begun.is_set():
            await asyncio.sleep(0.001)
        small = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert small.status_code == 200
        assert not any(each.done() for each in large)
        tokens.release.set()
        assert [(await each).status_code for each in large] == [200] * 5

        # What is wrong with a large body is said as for a small one.
        wrong = BODIES[path] | {"stream": "x" * 20_000, "tools": 5}
        assert "tools is 5; it must be a list" in (await server.post(path, wrong)).text
        assert "is not JSON" in (await server.post(path, b"[" * 20_000)).text

    asyncio.run(play())


@pytest.mark.parametrize(("mode", "status"), [("wait", -signal.SIGTERM), ("return", 0)])
def test_a_process_ends_although_a_tokenizer_is_busy(mode: str, status: int, forked_processes: None) -> None:
    command = [*fork_server.PYTHON, "-m", "tests.unit.endpoint.stuck_server", mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
        if mode == "wait":
            process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60) == status
        finally:
            process.kill()
