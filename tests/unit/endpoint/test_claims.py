"""Test that an episode goes to the next client if the one to which it was offered dies before it has read it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from megarl.config.schema import AgentConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.external import KEY_VARIABLE, ExternalHarness
from megarl.rollout.tool_calls import call_format
from tests.unit.endpoint.in_process import RUN_KEY, byte_tokenizer
from tests.unit.endpoint.session_servers import Serving

TOKENIZER = byte_tokenizer()
CLAIM = f"POST /sessions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {RUN_KEY}\r\n".encode()
ENDED = CLAIM + b"\r\n"


class Run:
    """A run with agents elsewhere, in the event loop of the test. Clients are plain sockets of the same thread."""

    def __init__(self) -> None:
        self.serving = Serving(
            ExternalHarness(), TOKENIZER, ChatTokens(TOKENIZER, partial(call_format, AgentConfig()))
        )
        self._num_offered = 0

    def client(self, sent: bytes) -> socket.socket:
        """Connect and send something."""
        address = urlsplit(self.serving.server.url)
        assert address.hostname is not None
        connection = socket.create_connection((address.hostname, address.port or 0))
        connection.sendall(sent)
        return connection

    def offer(self) -> None:
        self.serving.begin(self._num_offered)
        self._num_offered += 1

    async def live_client(self) -> str:
        """Claim an episode, end it, and return the key of the episode."""
        url = self.serving.server.url
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            claimed = await client.post("/sessions", headers={"x-api-key": RUN_KEY})
            assert claimed.status_code == 200
            key = claimed.json()["environment"]["OPENAI_API_KEY"]
            headers = {"x-api-key": key}
            body = {"messages": [{"role": "user", "content": "a"}]}
            assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            ended = await client.post("/session/end", json={"reward": 1}, headers=headers)
            assert ended.json() == {"reward": 1.0}
            return key


def play(scenario: Callable[[Run], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, RUN_KEY)

    async def run() -> None:
        prepared = Run()
        await prepared.serving.server.start()
        await scenario(prepared)
        await prepared.serving.end()
        ended: Any = prepared.serving.reports
        assert [each.trajectory.failure for each in ended] == [None] * len(ended)

    asyncio.run(run())


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def reset(connection: socket.socket) -> None:
    """Close a connection with a reset, as the system of a killed client does after it lost its network."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("close", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("sent", [b"", CLAIM, ENDED], ids=["connected", "half", "claimed"])
def test_clients_that_die_before_the_offer(
    close: Callable[[socket.socket], None],
    sent: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has had some iterations of its event loop to notice the end of the clients."""

    async def scenario(run: Run) -> None:
        for num_iterations in (0, 1, 2, 3, 5, 100):
            clients = [run.client(sent) for _ in range(2)]
            await iterations(50)
            for client in clients:
                close(client)
            await iterations(num_iterations)
            for _ in clients:
                run.offer()
            keys = {await run.live_client() for _ in clients}
            assert len(keys) == 2

    play(scenario, monkeypatch)


def test_a_client_that_waits_beside_dead_ones_gets_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(run: Run) -> None:
        dead = [run.client(ENDED) for _ in range(3)]
        await iterations(50)
        living = asyncio.ensure_future(run.live_client())
        await asyncio.sleep(0.05)
        for client in dead:
            client.close()
        run.offer()
        await living

    play(scenario, monkeypatch)


def test_a_client_that_dies_with_an_unread_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_answered(client: socket.socket) -> bool:
        try:
            return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False

    async def scenario(run: Run) -> None:
        keys = set()
        for _ in range(5):
            client = run.client(ENDED)
            run.offer()
            while not is_answered(client):
                await asyncio.sleep(0)
            client.close()
            keys.add(await run.live_client())
        assert len(keys) == 5

    play(scenario, monkeypatch)


def test_a_client_keeps_an_episode_that_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients may close or reset the connection of the claim, and begin later."""

    async def scenario(run: Run) -> None:
        for close in (socket.socket.close, reset):
            client = run.client(ENDED)
            run.offer()
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            answer = b""
            while not answer.endswith(b"}}"):
                answer += await loop.sock_recv(client, 1 << 16)
            key = json.loads(answer.split(b"\r\n\r\n")[1])["environment"]["OPENAI_API_KEY"]
            headers = {"x-api-key": key}
            async with httpx.AsyncClient(base_url=run.serving.server.url, trust_env=False) as later:
                if close is reset:  # its key was used before
                    assert (await later.get("/session/task", headers=headers)).status_code == 200
                close(client)
                await asyncio.sleep(0.1)
                body = {"messages": [{"role": "user", "content": "a"}]}
                assert (await later.post("/v1/chat/completions", json=body, headers=headers)).is_success
                assert (await later.post("/session/end", json={}, headers=headers)).status_code == 200

    play(scenario, monkeypatch)
