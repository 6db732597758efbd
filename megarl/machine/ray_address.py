"""The Ray cluster named by RAY_ADDRESS."""

from __future__ import annotations

import ipaddress
import os
import re

VARIABLE = "RAY_ADDRESS"
AUTO = "auto"  # Ray's name for the cluster running on this machine
_LOCAL = "local"  # Ray's name for a cluster of this process only
_MAX_PORT = 2**16 - 1
_NAME = re.compile(r"[\w.-]+")  # of a host, or an IPv4 address


def cluster_address() -> str | None:
    """Return the cluster to join, or None if the run starts its own Ray.

    A run starts its own Ray without RAY_ADDRESS, or with RAY_ADDRESS=local.
    """
    address = os.environ.get(VARIABLE, "").strip()
    return None if address in ("", _LOCAL) else address


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises ValueError for an address of another form, with the valid forms."""
    if "://" in address:
        raise ValueError(
            f"{VARIABLE}={address}: megarl's driver must run inside the cluster and does not connect as a "
            "Ray client; submit the run as a Ray job (megarl train CONFIG --submit http://HEAD:8265), or run "
            f"it on a node of the cluster with {VARIABLE}=HOST:PORT or auto"
        )

    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_host = _is_ipv6(host[1:-1]) if is_bracketed else bool(_NAME.fullmatch(host))
    if not is_host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= _MAX_PORT:
        raise ValueError(
            f"{VARIABLE}={address} is not of the form HOST:PORT (HEAD:6379, [2001:db8::1]:6379); set it to "
            "that form, to auto, or to local to start its own Ray"
        )

    return host[1:-1] if is_bracketed else host, int(port)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
