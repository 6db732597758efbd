"""Test which values of RAY_ADDRESS are addresses."""

from __future__ import annotations

import pytest

from megarl.doctor.network import own_address
from megarl.machine.ray_address import host_and_port


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("head:6379", "head", 6379),
        ("node_1.cluster.local:1", "node_1.cluster.local", 1),
        ("10.0.0.1:65535", "10.0.0.1", 65535),
        ("[::1]:6379", "::1", 6379),
        ("[2001:db8::10]:6379", "2001:db8::10", 6379),
        ("[fe80::1%eth0]:6379", "fe80::1%eth0", 6379),
        ("[::ffff:10.0.0.1]:6379", "::ffff:10.0.0.1", 6379),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert host_and_port(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "::1", "2001:db8::10:6379", "fe80::1%eth0", "[::1:6379", "::1]:6379", "[::1]", "[]:6379", "[head]:6379",
        "[10.0.0.1]:6379", "[::1]]:6379", "[[::1]]:6379", "[::1] :6379", "[:::1]:6379", "head", "head:", ":6379",
        "head:0", "head:65536", "head:-1", "head:6379x", "head:\u0663", "a b:6379", "user@head:6379", "head:1:2",
        "ray://head:10001", "http://head:8265", "",
    ],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="RAY_ADDRESS="):
        host_and_port(address)


@pytest.mark.parametrize("address", [None, "auto", "::1", "no-such-host.invalid:6379", "127.0.0.1:6379"])
def test_the_own_address_without_a_cluster_that_can_be_reached(address: str | None) -> None:
    assert own_address(address) == "127.0.0.1"
