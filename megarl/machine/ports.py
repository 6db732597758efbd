"""A free port of this node that nobody else is given before the one it is for listens on it."""

from __future__ import annotations

import socket


def hold_port(host: str) -> socket.socket:
    """`host`: an address of this node; empty for all of them.

    Bound and not listening, the socket keeps the port from others, as the near end of a connection too, and lets those listen on it
    that set SO_REUSEADDR: torch's store, uvicorn. To be kept open until they do.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held
