"""A reserved port cannot be used by other processes, and its intended server listens on it, at one
address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megarl.machine import ports
from megarl.machine.ports import hold_lasting_ports, hold_port, listen, own_address


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
    assert own_address("203.0.113.7") == ""  # an address reserved for documentation
    with hold_port(own_address("203.0.113.7")) as held, listen("203.0.113.7", port := held.getsockname()[1]):
        socket.create_connection(("127.0.0.2", port)).close()


def test_lasting_ports_are_none_that_the_system_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's agents listen on ports chosen seconds before.

    If a connection gets one of them in the meantime, the node fails.
    """
    first_of_system = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    held = hold_lasting_ports("127.0.0.1", 4)
    chosen = [each.getsockname()[1] for each in held]
    assert len(set(chosen)) == 4
    assert all(20_000 <= port < first_of_system for port in chosen)
    monkeypatch.setattr(ports, "FIRST_PORT", min(chosen))
    monkeypatch.setattr(ports, "MOST_TRIED", first_of_system)
    again = hold_lasting_ports("127.0.0.1", 200)
    assert not {each.getsockname()[1] for each in again} & set(chosen)  # the chosen ports are in use
    monkeypatch.setattr(ports, "FIRST_PORT", first_of_system)  # no ports are left below the system's range
    others = hold_lasting_ports("127.0.0.1", 2)
    assert all(each.getsockname()[1] >= first_of_system for each in others)
    for each in [*held, *again, *others]:
        each.close()
