"""SGLang's HTTP server in a separate process.

It is reached over loopback or the given address, with a key generated for it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import psutil

from megarl.machine.errors import EngineDeadError
from megarl.rollout.sglang.backend import Backend, CallRefusedError
from megarl.rollout.sglang.http_client import ServerClient
from megarl.rollout.sglang.last_words import LastWords

_END_LIMIT_S = 10.0
_POLL_S = 0.2


class ServerBackend(Backend):
    """Backend with a server process.

    Args:
        start_limit_s: Time limit until the process serves.
    """

    def __init__(self, server_args: dict[str, Any], host: str, start_limit_s: float) -> None:
        self._server_args = server_args
        self._host = host
        self._start_limit_s = start_limit_s
        self.api_key = secrets.token_urlsafe(32)
        self._port = 0  # any free one

    def start(self) -> None:
        """Start the process. After `stop`, it serves at the same URL with the same key again."""
        self._last_words = LastWords()
        ready, ready_fd = os.pipe()

        # Redirect stdout to stderr, to keep SGLang's output out of the worker's own standard output.
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore::UserWarning", "-m", "megarl.rollout.sglang.server_process"],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=[ready_fd],
        )
        # Close this end here, or the pipe would stay open after the server has ended.
        os.close(ready_fd)
        settings = {
            "server_args": self._server_args,
            "host": self._host,
            "port": self._port,
            "api_key": self.api_key,
            "ready_fd": ready_fd,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._process.stdin.flush()

        # The server answers when it is ready; an empty line means that it ended or is too slow.
        with os.fdopen(ready) as pipe:
            answered, _, _ = select.select([pipe], [], [], self._start_limit_s)
            answer = pipe.readline() if answered else ""

        if not answer:
            words = self._last_words.read()
            self.stop()
            why = words or (
                "it ended without any output"
                if answered
                else f"it did not serve within {self._start_limit_s:g} s"
            )
            raise EngineDeadError(f"SGLang's server did not start: {why}")

        self._port = json.loads(answer)["port"]
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"
        self._children = psutil.Process(self._process.pid).children()  # its descendants change

    async def open(self) -> None:
        self._client = ServerClient(self.url, self.api_key)

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        answer = await self._client.post("generate", payload)
        if not answer.ok:
            raise ValueError(answer.message)
        return answer.json()

    async def call(self, endpoint: str, payload: dict[str, Any]) -> None:
        answer = await self._client.post(endpoint, _as_json(payload))
        if not answer.ok:
            raise CallRefusedError(f"{endpoint}: {answer.message}")

    async def flush_cache(self) -> bool:
        return (await self._client.post("flush_cache")).ok

    async def abort(self, names: Collection[str] | None) -> None:
        for body in [{"abort_all": True}] if names is None else [{"rid": name} for name in names]:
            await self.call("abort_request", body)

    async def is_responsive(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                return (await self._client.get("health_generate")).ok
        except (TimeoutError, EngineDeadError):
            return False

    def dead_process(self) -> str | None:
        code = self._process.poll()
        ended = None if code is None else f"the server, process {self._process.pid}, ended with code {code}"

        for child in self._children:
            if ended is None and not _is_alive(child):
                ended = f"process {child.pid} of the server ended"

        if ended is None:
            return None
        words = self._last_words.read()
        return ended + (f": {words}" if words else "")

    def process_ids(self) -> list[int]:
        return [self._process.pid, *(child.pid for child in self._children)]

    async def close(self) -> None:
        await self._client.close()

    def stop(self) -> None:
        """End the server: its standard input is closed, and it ends with its child processes.

        Processes that are too slow are killed.
        """
        assert self._process.stdin is not None
        # List the descendants now: after the server's end they can no longer be found through it.
        children = (
            psutil.Process(self._process.pid).children(recursive=True) if self._process.poll() is None else []
        )
        self._process.stdin.close()

        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

        for child in children:
            if _is_alive(child):
                child.kill()

        psutil.wait_procs(children, _END_LIMIT_S)
        self._last_words.close()


def _as_json(payload: dict[str, Any]) -> dict[str, Any]:
    """Encode lists of bytes as base64, the format of the server's request classes."""
    return {
        name: [base64.b64encode(item).decode() if isinstance(item, bytes) else item for item in value]
        if isinstance(value, list)
        else value
        for name, value in payload.items()
    }


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
