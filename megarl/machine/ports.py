"""A free port of this node that nobody else is given before the one it is for listens on it, and listening at one address alone."""

from __future__ import annotations

import errno
import socket


def hold_port(host: str) -> socket.socket:
    """`host`: an address of this node; empty for all of them.

    Bound and not listening, the socket keeps the port from others, as the near end of a connection too, and lets those listen on it
    that set SO_REUSEADDR: `listen`, uvicorn. To be kept open until they do.
    """
    held = socket.socket(_family(host))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def own_address(address: str) -> str:
    """`address` where this machine has it; else, as where addresses are translated, the empty one, which stands for all of them."""
    try:
        hold_port(address).close()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return ""
    return address


def listen(address: str, port: int) -> socket.socket:
    """For torch's TCPStore (master_listen_fd), which by itself listens at every address of the machine, for whoever comes.

    `address`: see own_address. Raises OSError where the port is taken.
    """
    return socket.create_server((own_address(address), port), family=_family(address))


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
