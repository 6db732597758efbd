"""Lets the programs of a sandbox without a network reach one endpoint, and nothing else.

A process joins the network namespace of the sandbox, listens there on loopback, and passes the socket to this
process, which relays each connection to the endpoint.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from megarl.agents.sandboxes.protocol import SandboxStartError
from megarl.machine.orders import start_order

_BLOCK = 1 << 16
_MOST_CONNECTIONS = 128  # of a sandbox at a time; each uses two descriptors of this process


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
