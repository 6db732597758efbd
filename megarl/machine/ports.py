"""A free port of this node that nobody else is given before the one it is for listens on it, and listening at
one address alone."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

_SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20_000  # Ray's workers have those from 10,002 to 19,999
MOST_TRIED = 1_000


def hold_port(host: str) -> socket.socket:
    """`host`: an address of this node; empty for all of them.

    Bound and not listening, the socket keeps the port from others, as the near end of a connection too, and
    lets those listen on it that set SO_REUSEADDR: `listen`, uvicorn. To be kept open until they do.
    """
    held = socket.socket(_family(host))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))

    return held


def hold_lasting_ports(host: str, count: int) -> list[socket.socket]:
    """Hold ports that are likely to be free also some seconds after they are released. Nobody can listen on
    them before.

    The system hands out ports of its own range to connections at any time, so these are below it, and above
    those of Ray's workers. Where there is no room between the two, they are of the system's range.
    """
    candidates = range(FIRST_PORT, max(int(_SYSTEM_RANGE.read_text().split()[0]), FIRST_PORT))
    held: list[socket.socket] = []

    # Port 0 asks the system for any free port, for when the preferred range has none left.
    for port in [*random.SystemRandom().sample(candidates, min(len(candidates), MOST_TRIED)), *[0] * count]:
        if len(held) == count:
            break
        each = socket.socket(_family(host))
        try:
            each.bind((host, port))
        except OSError as error:
            each.close()
            # A port that is taken is the only reason to try the next one.
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            held.append(each)

    return held


def own_address(address: str) -> str:
    """`address` where this machine has it; else, as where addresses are translated, the empty one, which
    stands for all of them."""
    try:
        hold_port(address).close()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return ""
    return address


def listen(address: str, port: int) -> socket.socket:
    """For torch's TCPStore (master_listen_fd), which by itself listens at every address of the machine, for
    whoever comes.

    `address`: see own_address. Raises OSError where the port is taken.
    """
    return socket.create_server((own_address(address), port), family=_family(address))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
