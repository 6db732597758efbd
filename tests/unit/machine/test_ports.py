"""A port that is held is nobody else's, and whom it is for listens on it."""

from __future__ import annotations

import socket

import pytest

from megarl.machine.ports import hold_port


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_held_port_is_for_those_who_know_it(host: str) -> None:
    with hold_port(host) as held:
        address = held.getsockname()
        with socket.socket(held.family) as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server((host, address[1]), family=held.family) as server:
            socket.create_connection(server.getsockname()[:2]).close()
