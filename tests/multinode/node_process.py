"""The first process of a node: it makes the node's namespaces, and keeps them until standard input closes.

    python -m tests.multinode.node_process SOCKET_FD SPECIFICATION

It sends its tap device to the socket, and then its pid as seen from outside.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fork_server.server import serve_elsewhere

INTERFACE = "eth0"
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_PR_SET_PDEATHSIG = 1
_MTU = 9000


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    node = json.loads(sys.argv[2])
    os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS | os.CLONE_NEWUTS | os.CLONE_NEWPID | os.CLONE_NEWIPC)
    # The next child is process 1 of the new process namespace; its end ends all processes of the node.
    if (pid := os.fork()) == 0:
        _die_with_parent()
        _set_up(node, connection)
        _reap()
    socket.send_fds(connection, [str(pid).encode()], [])
    os.waitpid(pid, 0)


def _set_up(node: dict[str, Any], connection: socket.socket) -> None:
    _run("mount", "--make-rprivate", "/")
    socket.sethostname(node["name"])
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "tmpfs", "-o", f"size={node['shm_mb']}m", "tmpfs", "/dev/shm")
    _own_tmp(node["tmp_mb"], node["shared"])
    _own_hosts(node["hosts"])
    if node["forks"] is not None:
        serve_elsewhere(Path(node["forks"]))

    # Interfaces that lead nowhere come first, as a container bridge or a management network may.
    taps = [_tap(name) for name in (*node["other_interfaces"], INTERFACE)]
    _run("ip", "link", "set", "lo", "up")
    for number, name in enumerate(node["other_interfaces"]):
        _run("ip", "addr", "add", f"172.17.{number}.1/24", "dev", name)
        _run("ip", "link", "set", name, "up")
    for address in node["addresses"]:
        _run("ip", "addr", "add", address, "dev", INTERFACE, *(["nodad"] if ":" in address else []))
    _run("ip", "link", "set", INTERFACE, "mtu", str(_MTU), "up")
    socket.send_fds(connection, [b"up"], [taps[-1]])


def _own_tmp(size_mb: int, shared: list[str]) -> None:
    """Give the node its own /tmp, in which the shared folders have the same paths as everywhere."""
    kept = [path for path in shared if Path(path).is_relative_to("/tmp")]
    descriptors = [os.open(path, os.O_PATH) for path in kept]
    _run("mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=1777", "tmpfs", "/tmp")
    for path, descriptor in zip(kept, descriptors, strict=True):
        Path(path).mkdir(parents=True, exist_ok=True)
        _run("mount", "--no-canonicalize", "--bind", f"/proc/{os.getpid()}/fd/{descriptor}", path)
        os.close(descriptor)


def _own_hosts(hosts: dict[str, str]) -> None:
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost",
        *(f"{address} {name}" for name, address in hosts.items()),
    ]
    file = Path("/tmp/hosts")
    file.write_text("\n".join(lines) + "\n")
    _run("mount", "--bind", str(file), "/etc/hosts")


def _tap(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def _reap() -> None:
    """Wait for the node's processes until the test ends, which closes standard input."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap_ended())
    while True:
        with suppress(InterruptedError):
            if not os.read(sys.stdin.fileno(), 1):
                os._exit(0)


def _reap_ended() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
