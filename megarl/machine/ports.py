"""Reserves and listens on ports of this node.

A free port is reserved until the intended process listens on it. Listening is at a single address.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20_000  # Ray's workers use ports 10,002 to 19,999
MOST_TRIED = 1_000


def hold_port(host: str, port: int = 0) -> socket.socket:
    """Reserve a port and return its socket, which must stay open until the port is in use.

    The socket is bound but not listening. It keeps other processes from using the port, also for outgoing
    connections, while servers that set SO_REUSEADDR can listen on it: `listen`, uvicorn.

    Args:
        host: An address of this node; empty for all of them.
        port: The port; 0 for any free one.
    """
    held = socket.socket(_family(host))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, port))

    return held


def hold_lasting_ports(host: str, count: int) -> list[socket.socket]:
    """Reserve ports that are likely to stay free for some seconds after they are released.

    No process can listen on them until then.

    The kernel assigns ports of its own range to connections at any time, so these ports are below that range,
    and above those of Ray's workers. If there is no room between the two, they come from the kernel's range.
    """
    candidates = range(FIRST_PORT, max(int(_SYSTEM_RANGE.read_text().split()[0]), FIRST_PORT))
    held: list[socket.socket] = []

    # Port 0 requests any free port, for when the preferred range has none left.
    for port in [*random.SystemRandom().sample(candidates, min(len(candidates), MOST_TRIED)), *[0] * count]:
        if len(held) == count:
            break
        each = socket.socket(_family(host))
        try:
            each.bind((host, port))
        except OSError as error:
            each.close()
            # Try the next port only if this one is in use.
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            held.append(each)

    return held


def own_address(address: str) -> str:
    """Return `address` if this machine has it.

    Otherwise, for example with address translation, return the empty address, which means all of them.
    """
    try:
        hold_port(address).close()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return ""
    return address


def listen(address: str, port: int) -> socket.socket:
    """Listen on a port, for torch's TCPStore (master_listen_fd).

    The store would otherwise accept connections at all addresses of the machine.

    Args:
        address: See own_address.

    Raises:
        OSError: The port is in use.
    """
    return socket.create_server((own_address(address), port), family=_family(address))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
