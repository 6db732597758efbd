"""A port that is held is nobody else's, and whom it is for listens on it, at one address."""

from __future__ import annotations

import socket

import pytest

from megarl.machine.ports import hold_port, listen, own_address


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_held_port_is_for_those_who_know_it(host: str) -> None:
    with hold_port(host) as held:
        address = held.getsockname()
        with socket.socket(held.family) as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.create_server((host, address[1]), family=held.family) as server:
            socket.create_connection(server.getsockname()[:2]).close()


def test_who_listens_at_one_address_is_not_reached_at_another() -> None:
    with hold_port("127.0.0.1") as held, listen("127.0.0.1", port := held.getsockname()[1]):
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))


def test_an_address_that_no_interface_has_stands_for_all_of_them() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("203.0.113.7") == ""  # for documentation only, so nobody's
    with hold_port(own_address("203.0.113.7")) as held, listen("203.0.113.7", port := held.getsockname()[1]):
        socket.create_connection(("127.0.0.2", port)).close()
