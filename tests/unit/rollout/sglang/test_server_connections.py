"""Test the client of SGLang's server against real socket servers that close connections at the wrong
moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from megarl.machine.errors import EngineDeadError
from megarl.rollout.sglang.server import ServerBackend

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n%s\r\n{}"


class Server:
    """Server that answers requests on 127.0.0.1 and records them as (number of the connection, path)."""

    def __init__(self, num_dropped: int = 0, half_answers: bool = False) -> None:
        """Configure the faults.

        Args:
            num_dropped: Number of connections that are closed once their request was read.
            half_answers: Whether connections are closed within the answer.
        """
        self.requests: list[tuple[int, str]] = []
        self._num_connections = 0
        self._num_dropped = num_dropped
        self._half_answers = half_answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        connection = self._num_connections

        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(_content_length(head))
                self.requests.append((connection, head.split()[1].decode()))
                # To the client, a server that has closed an idle connection looks like this one from the
                # second request on.
                if (
                    connection <= self._num_dropped
                    or len([one for one, _ in self.requests if one == connection]) > 1
                ):
                    return
                closes = b"connection: close" in head.lower()
                answer = ANSWER % (b"Connection: close\r\n" if closes else b"")
                writer.write(answer[:-1] if self._half_answers else answer)
                await writer.drain()
                if closes or self._half_answers:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def _content_length(head: bytes) -> int:
    values = [
        line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    ]
    return int(values[0]) if values else 0


def ask(server: Server, what: Callable[[ServerBackend], Awaitable[Any]]) -> Any:
    async def go() -> Any:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        backend = ServerBackend({}, "127.0.0.1", start_limit_s=1.0)
        backend.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await backend.open()

        try:
            return await what(backend)
        finally:
            await backend.close()
            listening.close()

    return asyncio.run(go())


def test_no_connection_is_used_twice() -> None:
    async def calls(backend: ServerBackend) -> None:
        await backend.call("pause_generation", {"mode": "retract"})
        await backend.call("update_weights_from_tensor", {"serialized_named_tensors": [b"weights"]})
        assert await backend.generate({"input_ids": [5]}) == {}
        assert await backend.flush_cache()
        await backend.abort(["one", "two"])
        assert await backend.is_responsive(limit_s=60.0)

    server = Server()
    ask(server, calls)
    assert [connection for connection, _ in server.requests] == list(range(1, 8))


@pytest.mark.parametrize(
    "endpoint", ["pause_generation", "continue_generation", "abort_request", "update_weight_version"]
)
def test_a_call_that_may_arrive_twice_is_repeated(endpoint: str) -> None:
    server = Server(num_dropped=2)
    ask(server, lambda backend: backend.call(endpoint, {}))
    assert server.requests == [(1, f"/{endpoint}"), (2, f"/{endpoint}"), (3, f"/{endpoint}")]


def test_health_and_the_cache_are_asked_for_again() -> None:
    assert ask(Server(num_dropped=1), lambda backend: backend.is_responsive(limit_s=60.0))
    assert ask(Server(num_dropped=1), lambda backend: backend.flush_cache())


@pytest.mark.parametrize(
    "endpoint", ["update_weights_from_tensor", "begin_weight_update", "resume_memory_occupation"]
)
@pytest.mark.parametrize("server", [{"num_dropped": 1}, {"half_answers": True}])
def test_a_call_that_must_not_arrive_twice_is_sent_once(endpoint: str, server: dict[str, Any]) -> None:
    broken = Server(**server)
    with pytest.raises(EngineDeadError, match=rf"the connection to SGLang's server broke \(/{endpoint}\)"):
        ask(broken, lambda backend: backend.call(endpoint, {}))
    assert broken.requests == [(1, f"/{endpoint}")]


def test_a_server_that_never_answers_is_dead() -> None:
    server = Server(num_dropped=100)
    with pytest.raises(EngineDeadError, match="Server disconnected"):
        ask(server, lambda backend: backend.call("pause_generation", {}))
    assert 1 < len(server.requests) < 10
    assert ask(Server(num_dropped=100), lambda backend: backend.is_responsive(limit_s=60.0)) is False
