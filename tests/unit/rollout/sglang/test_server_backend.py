"""Test the client of SGLang's server without a server."""

from __future__ import annotations

import asyncio
import socket

import pytest

from megarl.machine.errors import EngineDeadError
from megarl.rollout.sglang.server import ServerBackend


def test_a_broken_connection_is_the_servers_end() -> None:
    backend = ServerBackend({}, "127.0.0.1", start_limit_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        backend.url = f"http://127.0.0.1:{nobody.getsockname()[1]}"

    async def ask() -> None:
        await backend.open()
        try:
            await backend.generate({"input_ids": [5]})
        finally:
            await backend.close()

    with pytest.raises(EngineDeadError, match="the connection to SGLang's server broke"):
        asyncio.run(ask())


def test_every_server_has_a_key_of_its_own() -> None:
    keys = {ServerBackend({}, "127.0.0.1", start_limit_s=1.0).api_key for _ in range(10)}
    assert len(keys) == 10
    assert min(map(len, keys)) >= 40
