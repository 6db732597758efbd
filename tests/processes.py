"""Watch processes from a test: find those that must end but still exist."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import psutil


def gone_within(processes: Sequence[psutil.Process], limit_s: float) -> list[str]:
    """Wait until all have ended; describe those that have not after `limit_s` seconds. A psutil.Process
    detects a reused pid."""
    deadline = time.monotonic() + limit_s
    while (alive := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [_describe(process) for process in alive]


def reached_by_strangers(processes: Sequence[psutil.Process]) -> list[str]:
    """List sockets that accept connections from other machines: by their address, or by connecting through
    the network's address."""
    ports = set()
    found = []

    for process in processes:
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                ports.add(one.laddr.port)
                if not one.laddr.ip.removeprefix("::ffff:").startswith("127.") and one.laddr.ip != "::1":
                    found.append(f"{_describe(process)} listens at {one.laddr.ip}:{one.laddr.port}")

    assert ports, "no process listens, so nothing was proved"
    outer = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    ]

    for address in (each for each in outer if not each.startswith("127.")):
        for port in ports:
            with socket.socket() as stranger:
                if stranger.connect_ex((address, port)) == 0:
                    found.append(f"{address}:{port} answers")

    return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid}"
