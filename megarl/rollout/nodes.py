"""The workers of an engine that spans several nodes, one on each: how they meet, and notice each other's end.

The worker on the first node serves the engine's requests. Each other worker connects to it before the engine
starts, learns where the engine's ranks meet, and keeps the connection. Its end is the end of the engine: on
GPUs, the ranks of the first node would otherwise wait for the lost ones in a kernel, without an error.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import NamedTuple

from megarl.machine.errors import EngineDeadError
from megarl.machine.ports import hold_port, listen, own_address

_POLL_S = 0.2
_HELLO_LIMIT_S = 10.0
_MAX_BYTES = 65536
# A node that has lost its power or its network ends its connections after half a minute without an answer.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


class EngineNode(NamedTuple):
    """One of the nodes of an engine.

    Attributes:
        rank: The number of the node within the engine. The worker of node 0 serves the requests.
        num_nodes: The number of nodes of the engine.
        address: The address of node 0.
        port: A port of node 0, reserved for its worker.
    """

    rank: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0


ONLY_NODE = EngineNode()


class OtherNodes:
    """The connections of node 0 with the other nodes of its engine.

    Args:
        node: Node 0.
        limit_s: How long to wait for the other nodes.

    Raises:
        EngineDeadError: A node has not connected in time.
    """

    def __init__(self, node: EngineNode, limit_s: float) -> None:
        self._connections: dict[int, socket.socket] = {}
        self._held = hold_port(own_address(node.address))
        self.ranks_port: int = self._held.getsockname()[1]  # where the engine's ranks meet
        if node.num_nodes == 1:
            return

        deadline_s = time.monotonic() + limit_s
        with listen(node.address, node.port) as listener:
            while missing := set(range(1, node.num_nodes)) - self._connections.keys():
                if not select.select([listener], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                    self.close()
                    raise EngineDeadError(
                        f"nodes {sorted(missing)} of the {node.num_nodes} have not connected to "
                        f"{node.address}:{node.port} within {limit_s:g} s"
                    )
                self._welcome(listener.accept()[0], missing)

    def _welcome(self, connection: socket.socket, missing: set[int]) -> None:
        """Accept a connection if it comes from a missing node."""
        connection.settimeout(_HELLO_LIMIT_S)
        try:
            number = int(json.loads(connection.recv(_MAX_BYTES))["node"])
            connection.sendall(json.dumps({"ranks_port": self.ranks_port}).encode())
        except (OSError, ValueError, KeyError, TypeError):  # of a stranger, such as a scan of ports
            connection.close()
            return

        if number not in missing:
            connection.close()
            return

        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connections[number] = connection

    def lost(self) -> str | None:
        """Describe a node whose part of the engine has ended; None if all are there."""
        for number, connection in self._connections.items():
            # A node sends nothing before its part of the engine ends.
            if not select.select([connection], [], [], 0)[0]:
                continue
            try:
                words = connection.recv(_MAX_BYTES).decode()
            except OSError as error:
                words = f"the connection was lost: {error}"
            return f"node {number} of the engine: {words or 'its worker ended'}"
        return None

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._held.close()


class FirstNode:
    """The connection of another node with node 0.

    Raises:
        EngineDeadError: The worker of node 0 has not answered in time, or has ended.
    """

    def __init__(self, node: EngineNode, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                self._connection = socket.create_connection((node.address, node.port), _HELLO_LIMIT_S)
                break
            except OSError as error:
                # The worker of node 0 may still be starting.
                if time.monotonic() > deadline_s:
                    raise EngineDeadError(
                        f"node {node.rank} of the engine cannot reach node 0 at {node.address}:{node.port} "
                        f"within {limit_s:g} s: {error}"
                    ) from error
                time.sleep(_POLL_S)

        try:
            self._connection.settimeout(limit_s)
            self._connection.sendall(json.dumps({"node": node.rank}).encode())
            self.ranks_port: int = json.loads(self._connection.recv(_MAX_BYTES))["ranks_port"]
        except (OSError, ValueError) as error:
            self._connection.close()
            raise EngineDeadError(f"node 0 of the engine has ended: {error or 'no answer'}") from error

    def report(self, words: str) -> None:
        """Report the end of this node's part of the engine."""
        with contextlib.suppress(OSError):  # node 0 has ended too
            self._connection.sendall(words.encode()[-_MAX_BYTES:])
            self._connection.close()

    def close(self) -> None:
        self._connection.close()
