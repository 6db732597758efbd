"""Interface of sandboxes: a file system of its own for one episode, in which commands run.

A sandbox without a network can reach one endpoint, and nothing else: a process joins its network namespace,
listens there on loopback, and passes the socket to this process, which relays connections to the endpoint.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import json
import os
import socket
import sys
import tarfile
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import megarl
from megarl.config.schema import SandboxConfig
from megarl.machine.reaper import OWNER

OUTPUT_BYTES = 1 << 16  # the end of a command's output that is kept
FILE_BYTES = 64 << 20  # the largest file that is downloaded
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_BLOCK = 1 << 16
_MOST_CONNECTIONS = 128  # of a sandbox at a time; each uses two descriptors of this process


class SandboxStartError(RuntimeError):
    """A sandbox could not be started. The message contains the reason and the fix."""


class SandboxEndedError(RuntimeError):
    """A sandbox has ended early, such as because its programs exceeded a limit."""


class Executed(NamedTuple):
    """The result of a command.

    Attributes:
        status: Its exit status; 128 and the signal's number if a signal has ended it, as in a shell.
        output: The end of what it wrote to standard output and standard error.
    """

    status: int
    output: str


class Sandbox(ABC):
    """A sandbox. Relative paths are relative to its working folder.

    Attributes:
        endpoint_url: The address at which its programs reach the endpoint that it was started with; empty if
            there is none.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.endpoint_url = ""
        self._config = config
        self._relay: EndpointRelay | None = None

    @abstractmethod
    async def begin(self, endpoint_url: str) -> None:
        """Start the sandbox. `close` also ends one whose start has failed, or was canceled.

        Args:
            endpoint_url: The endpoint that its programs can reach; empty if there is none.

        Raises:
            SandboxStartError: It cannot be started.
        """

    @abstractmethod
    async def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] = NO_VARIABLES,
        time_limit_s: float | None = None,
    ) -> Executed:
        """Run a command until it has ended and its output is closed.

        Args:
            command: A program and its arguments. No shell reads them.
            environment: Variables in addition to those of the sandbox. None are inherited from the run.

        Raises:
            TimeoutError: The time is over. The command has been killed, but the sandbox can still be used.
            SandboxEndedError: The sandbox has ended.
        """

    @abstractmethod
    async def upload(self, source: bytes | Path, target: str) -> None:
        """Write a file, or a folder with everything in it. Folders above the target are created.

        Args:
            source: The content of a file, or a path of this machine.
        """

    @abstractmethod
    async def download(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            ValueError: It does not exist, is no file, or is larger than FILE_BYTES.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all processes and remove all files. May be called again. This part closes the relay."""
        if self._relay is not None:
            await self._relay.close()

    async def _relay_to(self, endpoint_url: str, pidfd: int) -> None:
        """Let the namespace of a process reach the endpoint. Raises SandboxStartError."""
        self._relay = await EndpointRelay.start(endpoint_url, pidfd)
        self.endpoint_url = self._relay.url


def archive_of(source: bytes | Path, target: str) -> bytes:
    """Return a tar archive with one file, or with everything in a folder, that belongs to root.

    Args:
        target: The name in the archive.
    """

    def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        if isinstance(source, Path):
            # A link to the source would lead nowhere in the sandbox.
            archive.add(source.resolve(), target.lstrip("/"), filter=of_root)
        else:
            member = tarfile.TarInfo(target.lstrip("/"))
            member.size = len(source)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(source))

    return packed.getvalue()


class EndpointRelay:
    """A relay to an endpoint from the network namespace of a process.

    Attributes:
        url: The address of the endpoint in that namespace.
    """

    def __init__(self, endpoint_url: str, listening: socket.socket) -> None:
        target = urlsplit(endpoint_url)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._address = (target.hostname, target.port)
        self._listening = listening
        self._server: asyncio.Server
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(cls, endpoint_url: str, pidfd: int) -> EndpointRelay:
        """Start a relay.

        Args:
            pidfd: A descriptor of a process in the namespace.

        Raises:
            SandboxStartError: This process may not join the namespace.
        """
        relay = cls(endpoint_url, await _listen_in(pidfd))
        relay._server = await asyncio.start_server(relay._relay, sock=relay._listening)
        return relay

    async def close(self) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.cancel()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MOST_CONNECTIONS:
            writer.close()
            return

        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)

        writers = [writer]
        try:
            with suppress(OSError):
                beyond_reader, beyond_writer = await asyncio.open_connection(*self._address)
                writers.append(beyond_writer)
                directions = [
                    asyncio.ensure_future(_copy(reader, beyond_writer)),
                    asyncio.ensure_future(_copy(beyond_reader, writer)),
                ]
                try:
                    # Clients of HTTP do not half-close: if one side has gone, the other must see it.
                    await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for direction in directions:
                        direction.cancel()
        finally:
            for each in writers:
                each.close()
            self._connections.discard(connection)


def is_loopback(url: str) -> bool:
    """Return whether an address can only be reached from its own network namespace."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()


async def _listen_in(pidfd: int) -> socket.socket:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = theirs.fileno()
        process = await start_order(pidfd, "listen", pass_fds=[channel], channel=channel)
        _, errors = await process.communicate()
        if process.returncode:
            raise SandboxStartError(
                f"the network of the sandbox cannot be joined: {errors.decode(errors='replace').strip()}"
            )
        _, (descriptor,), _, _ = socket.recv_fds(ours, 64, 1)

    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


async def write_input(process: Process, content: bytes) -> None:
    """Write the standard input of a process, and close it. The process need not read it."""
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(content)
        await process.stdin.drain()
    process.stdin.close()


async def end_of_output(process: Process) -> bytes:
    """Return the end of what a process writes to standard output, however much it is."""
    assert process.stdout is not None
    kept = b""
    while block := await process.stdout.read(OUTPUT_BYTES):
        kept = (kept + block)[-OUTPUT_BYTES:]
    return kept


# ---- orders in the namespaces of a sandbox, see megarl/machine/namespaces.py


SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START = (
    f"import sys; sys.path.insert(0, {str(Path(megarl.__file__).absolute().parents[1])!r}); from "
    "megarl.machine.namespaces import run; run(*map(int, sys.argv[1:]))"
)


async def start_order(
    pidfd: int, order: str, *, stderr: int = PIPE, pass_fds: Sequence[int] = (), **arguments: Any
) -> Process:
    """Start an order, with pipes for its standard input and output.

    Args:
        pidfd: A descriptor of the process whose namespaces are joined. A process number could be used again.
        order: The name of a function in megarl.machine.namespaces.ORDERS.
        stderr: As for a subprocess.
        pass_fds: Descriptors that it inherits.
        arguments: The further arguments of the function.
    """
    # Other users of the machine can read command lines, and the arguments contain keys.
    with open(os.memfd_create("order"), "w+b") as file:
        file.write(json.dumps([order, arguments]).encode())
        file.seek(0)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-B", "-c", _START, str(pidfd), str(file.fileno())),
            pass_fds=[pidfd, file.fileno(), *pass_fds],
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            env=own_environment(),
        )


def own_environment() -> dict[str, str]:
    """Return the variables of processes that hold or join a sandbox: the mark by which the run ends them."""
    return {"PATH": SEARCH_PATH, **{name: os.environ[name] for name in (OWNER,) if name in os.environ}}
