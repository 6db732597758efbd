"""Sandboxes that are containers, of Docker or podman, by the API that both have on a Unix socket.

The first process of a container reads from a connection of this process. If this process ends, however it
ends, the engine closes that input, the first process ends, and the engine removes the container.

Source: the Docker Engine API, v1.41.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import secrets
import tarfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from megarl.agents.sandboxes.protocol import (
    FILE_BYTES,
    NO_VARIABLES,
    OUTPUT_BYTES,
    Executed,
    Sandbox,
    SandboxEndedError,
    SandboxStartError,
    archive_of,
    is_loopback,
)
from megarl.config.schema import SandboxConfig
from megarl.machine.reaper import OWNER

_VERSION = "/v1.41"
_ADDRESS_VARIABLE = "DOCKER_HOST"
_SCHEME = "unix://"
_HOST = "http://engine"  # HTTP needs a name
_LABEL = "megarl"
_MARK = "MEGARL_SANDBOX"  # a variable of the first process, by which it is recognized
_KILLED = (124, 128 + 9)  # statuses of `timeout`
_POLL_S = 0.05
_BEGIN_S = 5.0
_KILL_S = 1.0  # for `timeout` to kill a command
_STALE_S = 600.0  # the age of a container that was created and never started
_MEGABYTE = 1 << 20
_FRAME_BYTES = 8  # header of a part of the output: the stream, three zero bytes, and the length


class ContainerSandbox(Sandbox):
    """A container."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._engine = _Engine(socket_path())
        self._name = ""
        self._folder = "/"
        self._input: asyncio.StreamWriter | None = None
        self._creating: asyncio.Task[httpx.Response] | None = None

    async def begin(self, endpoint_url: str) -> None:
        with _engine_errors_as(SandboxStartError, "the container cannot be started"):
            engine, config = self._engine, self._config
            assert config.image is not None
            if not await engine.has_image(config.image):
                await engine.pull(config.image)

            self._name = name = f"megarl-{secrets.token_hex(8)}"
            # If the start is canceled, the engine may create the container nevertheless; `close` removes it.
            self._creating = asyncio.ensure_future(
                engine.call("POST", f"/containers/create?name={name}", json=_container(config, name))
            )
            await asyncio.shield(self._creating)

            _, self._input = await engine.attach(f"/containers/{name}/attach?stdin=1&stream=1")
            await engine.call("POST", f"/containers/{name}/start")

            state = (await engine.call("GET", f"/containers/{name}/json")).json()
            # An engine that cannot enforce a limit accepts it with a warning, and reports it as 0.
            if state["HostConfig"]["Memory"] != config.memory_mb * _MEGABYTE:
                raise SandboxStartError(
                    "the engine cannot limit memory and processes; rootless, it needs cgroup v2"
                )

            self._folder = state["Config"]["WorkingDir"] or "/"
            self.endpoint_url = endpoint_url

            # With a network, the container can reach an address of the machine, but not its loopback.
            if endpoint_url and (not config.network or is_loopback(endpoint_url)):
                pidfd = await _first_process(state["State"]["Pid"], name)
                try:
                    await self._relay_to(endpoint_url, pidfd)
                finally:
                    os.close(pidfd)

    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] = NO_VARIABLES,
        time_limit_s: float | None = None,
    ) -> Executed:
        # The API cannot end a command. A program that has left its group, or replaced `timeout`, continues.
        limit_s = None if time_limit_s is None else math.ceil(time_limit_s)
        limit = [] if limit_s is None else ["timeout", "-s", "KILL", str(limit_s)]
        order = {
            "Cmd": [*limit, *command],
            "Env": [f"{name}={value}" for name, value in environment.items()],
            **dict.fromkeys(("AttachStdin", "AttachStdout", "AttachStderr"), True),
        }

        started_s = time.monotonic()
        # Outside of the other block, which would report a timeout as the end of the container.
        async with asyncio.timeout(None if limit_s is None else limit_s + _KILL_S):
            with _engine_errors_as(SandboxEndedError, "the container has ended"):
                made = await self._engine.call("POST", f"/containers/{self._name}/exec", json=order)
                path = f"/exec/{made.json()['Id']}"
                reader, writer = await self._engine.attach(f"{path}/start", {"Detach": False, "Tty": False})
                try:
                    _, output = await asyncio.gather(_write(writer, stdin), _output(reader))
                finally:
                    writer.close()
                # The output may be closed earlier than the command ends.
                while (ended := (await self._engine.call("GET", f"{path}/json")).json())["Running"]:
                    await asyncio.sleep(_POLL_S)

        status = ended["ExitCode"]
        if time_limit_s is not None and status in _KILLED and time.monotonic() - started_s >= time_limit_s:
            raise TimeoutError(f"{command[0]} took longer than {time_limit_s:g} s")
        return Executed(status, output.decode(errors="replace"))

    async def upload(self, source: bytes | Path, target: str) -> None:
        archive = archive_of(source, os.path.join(self._folder, target))
        url = f"/containers/{self._name}/archive"
        with _engine_errors_as(SandboxEndedError, f"{target} cannot be uploaded"):
            await self._engine.call("PUT", url, params={"path": "/"}, content=archive)

    async def download(self, path: str) -> bytes:
        content = bytearray()
        url = f"{_VERSION}/containers/{self._name}/archive"
        parameters = {"path": os.path.join(self._folder, path)}

        with _engine_errors_as(SandboxEndedError, "the container has ended"):
            async with self._engine.client.stream("GET", url, params=parameters) as response:
                if response.is_error:
                    raise ValueError(f"{path}: {_reason(await response.aread())}")
                async for block in response.aiter_bytes():
                    content += block
                    if len(content) > FILE_BYTES + _MEGABYTE:  # with the headers of the archive
                        raise ValueError(f"{path} is larger than {FILE_BYTES // _MEGABYTE} MiB")

        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            member = archive.next()
            file = archive.extractfile(member) if member is not None and member.isreg() else None
            if file is None:
                raise ValueError(f"{path} is not a file")
            return file.read()

    async def close(self) -> None:
        await super().close()
        if self._creating is not None:
            await asyncio.wait({self._creating})
            with suppress(httpx.TransportError):  # the engine has gone
                await self._engine.client.delete(f"{_VERSION}/containers/{self._name}?force=1&v=1")
        # Later than the request, because the engine answers it only once the container is removed.
        if self._input is not None:
            self._input.close()

        await self._engine.client.aclose()


def _container(config: SandboxConfig, name: str) -> dict[str, Any]:
    """Return the order for a container."""
    memory = config.memory_mb * _MEGABYTE
    return {
        "Image": config.image,
        "Entrypoint": ["cat"],
        "Cmd": [],
        "Env": [f"{_MARK}={name}"],
        "Labels": {_LABEL: os.environ.get(OWNER, str(os.getpid()))},
        # Once this connection ends, the input of `cat` ends.
        **dict.fromkeys(("OpenStdin", "StdinOnce", "AttachStdin"), True),
        "HostConfig": {
            "AutoRemove": True,
            "Init": True,  # ends and collects what commands leave behind
            "NetworkMode": "default" if config.network else "none",
            "Memory": memory,
            "MemorySwap": memory,
            "PidsLimit": config.max_processes,
            "SecurityOpt": ["no-new-privileges"],
            **({} if config.cpus is None else {"NanoCpus": round(config.cpus * 1e9)}),
        },
    }


async def _first_process(pid: int, name: str) -> int:
    """Return a descriptor of the first process of a container.

    Raises:
        SandboxStartError: The process is not visible here, or another one has its number here, because the
            engine runs in another process namespace.
    """
    mark = f"{_MARK}={name}".encode()
    why = "it is another process here"

    try:
        pidfd = os.pidfd_open(pid)
        # The engine answers before the process has become the program of the container.
        deadline_s = time.monotonic() + _BEGIN_S
        while time.monotonic() < deadline_s:
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pidfd
            await asyncio.sleep(_POLL_S)
        os.close(pidfd)
    except OSError as error:
        why = str(error)

    raise SandboxStartError(
        f"the network of the container cannot be joined through its process {pid}: {why}. Run the engine on "
        f"the machine of the run, and as its user; or use network: true, and an agent.harness.host that "
        f"containers can reach"
    )


def socket_path() -> str:
    """Return the socket of the engine: DOCKER_HOST, or the usual one of podman or Docker.

    Raises:
        SandboxStartError: There is none.
    """
    given = os.environ.get(_ADDRESS_VARIABLE)
    if given is not None and not given.startswith(_SCHEME):
        raise SandboxStartError(f"{_ADDRESS_VARIABLE} is {given!r}; provider container needs {_SCHEME}PATH")

    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    usual = (f"{runtime}/podman/podman.sock", "/run/podman/podman.sock", "/var/run/docker.sock")
    for path in usual if given is None else [given.removeprefix(_SCHEME)]:
        if os.path.exists(path):
            return path

    looked_for = given or " or ".join(usual)
    raise SandboxStartError(
        f"provider container needs a container engine, but there is no socket {looked_for}; start "
        f"podman's service (systemctl --user start podman.socket) or Docker, or set {_ADDRESS_VARIABLE}"
    )


class _EngineError(Exception):
    """The engine has refused a request."""


@contextmanager
def _engine_errors_as(kind: type[Exception], what: str) -> Generator[None]:
    try:
        yield
    except (httpx.TransportError, OSError, EOFError, _EngineError) as error:
        raise kind(f"{what}: {str(error) or repr(error)}") from error


class _Engine:
    """The API of an engine.

    Attributes:
        client: For requests. Paths begin with _VERSION.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        # Pulling an image takes minutes. The time limit is that of the sandbox's start.
        transport = httpx.AsyncHTTPTransport(uds=path, verify=False)
        self.client = httpx.AsyncClient(transport=transport, base_url=_HOST, timeout=None)

    async def call(self, method: str, path: str, **how: Any) -> httpx.Response:
        """Send a request. Raises _EngineError if the engine refuses it."""
        if self.client.is_closed:
            raise _EngineError("it was closed")
        response = await self.client.request(method, _VERSION + path, **how)
        if response.is_error:
            raise _EngineError(_reason(response.content))
        return response

    async def has_image(self, image: str) -> bool:
        response = await self.client.get(f"{_VERSION}/images/{image}/json")
        return response.status_code == httpx.codes.OK

    async def pull(self, image: str) -> None:
        """Pull an image, without credentials. Raises _EngineError."""
        # Without a tag, Docker would pull all of them.
        has_tag = ":" in image.rpartition("/")[2] or "@" in image
        parameters = {"fromImage": image if has_tag else f"{image}:latest"}
        async with self.client.stream("POST", f"{_VERSION}/images/create", params=parameters) as response:
            lines = [line async for line in response.aiter_lines() if line]
        errors = [json.loads(line) for line in lines if '"error"' in line or response.is_error]
        if errors:
            why = errors[-1].get("error") or errors[-1].get("message")
            raise _EngineError(f"image {image!r} is not on this machine and cannot be pulled: {why}")

    async def attach(
        self, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request whose connection becomes the streams of a process. Raises _EngineError."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        content = json.dumps(body or {}).encode()
        head = (
            f"POST {_VERSION}{path} HTTP/1.1\r\nHost: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )

        writer.write(head.encode() + content)
        answer = await reader.readuntil(b"\r\n\r\n")
        # Engines that ignore `Upgrade` hand over the connection with status 200.
        if int(answer.split(maxsplit=2)[1]) not in (101, 200):
            why = _reason(await reader.read(_MEGABYTE))
            writer.close()
            raise _EngineError(why)

        return reader, writer


def _reason(content: bytes) -> str:
    """Return the message of an error of the engine."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["message"])
    return content.decode(errors="replace").strip()


async def _write(writer: asyncio.StreamWriter, content: bytes) -> None:
    # A program may end before it has read everything.
    with suppress(ConnectionError):
        writer.write(content)
        await writer.drain()
        writer.write_eof()


async def _output(reader: asyncio.StreamReader) -> bytes:
    """Return the end of the output of both streams."""
    kept = b""
    with suppress(asyncio.IncompleteReadError):  # the container was removed
        while header := await reader.read(1):
            header += await reader.readexactly(_FRAME_BYTES - 1)
            left = int.from_bytes(header[4:], "big")
            while left:
                block = await reader.readexactly(min(left, OUTPUT_BYTES))
                left -= len(block)
                kept = (kept + block)[-OUTPUT_BYTES:]
    return kept


def prepare() -> str:
    """Remove containers of runs that were killed before they had started them.

    Returns:
        Why no container can be started here, in one line; empty if the engine answers.
    """
    chosen = {"all": "1", "filters": json.dumps({"label": [_LABEL], "status": ["created"]})}
    try:
        transport = httpx.HTTPTransport(uds=socket_path(), verify=False)
        with httpx.Client(transport=transport, base_url=f"{_HOST}{_VERSION}") as client:
            for found in client.get("/containers/json", params=chosen).raise_for_status().json():
                if time.time() - found["Created"] > _STALE_S:
                    client.delete(f"/containers/{found['Id']}", params={"force": "1"})
    except (SandboxStartError, httpx.HTTPError) as error:
        return str(error)
    return ""
