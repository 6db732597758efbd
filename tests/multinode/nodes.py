"""Nodes in namespaces of one machine, joined by a switch that can lose and delay frames.

with network(3, shared=[folder]) as net:
    net.nodes[1].run(["python", ...])
    net.cut(1)                            # no frame from or to node 1 arrives any more
    net.heal()
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from tests import fork_server

ROOT = Path(__file__).parents[2]
# The address of a node's own fork server, in its own /tmp.
_FORKS = "/tmp/forks"
_PROGRAMS = ("ip", "mount", "nsenter", "unshare")


@cache
def missing() -> str | None:
    """Return why nodes cannot be made here, or None if they can."""
    if absent := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(absent)}"
    # A tap in a network namespace, and a mount in a mount namespace: containers may forbid each of them.
    attempt = "ip tuntap add name eth0 mode tap && mount -t tmpfs tmpfs /tmp"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-c", attempt],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"no namespaces with a network: {tried.stderr.strip()}"


class Link(NamedTuple):
    """What happens to frames from `source` to `target`: the share that is lost, and the delay of others."""

    source: int
    target: int
    loss: float = 0.0
    delay_s: float = 0.0


@dataclass
class Node:
    """A node. Its processes run as root, see the repository and the shared folders, and nothing of other nodes.

    Attributes:
        number: Its number.
        name: The host name.
        address: The address on the network of the nodes.
        pid: The pid of its first process, as seen from outside. SIGKILL to it is a power failure.
    """

    number: int
    name: str
    address: str
    pid: int
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: IO[str] | int = subprocess.DEVNULL,
        cwd: Path = ROOT,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a program on the node. The returned process is one outside that waits for it."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid", "--ipc"]
        process = subprocess.Popen(
            [*enter, f"--wdns={cwd}", "--", *command],
            env=environment,
            stderr=log,
            text=True,
            **options,
        )
        self._started.append(process)
        return process

    def run(self, command: Sequence[str], environment: Mapping[str, str], limit_s: float = 120) -> str:
        """Run a program on the node, and return its output."""
        process = self.start(
            command, environment, log=subprocess.PIPE, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        out, error = process.communicate(timeout=limit_s)
        assert process.returncode == 0, error[-3000:]
        return out

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the node."""
        inside = _network_of(self.pid)
        return [process for process in psutil.process_iter() if _network_of(process.pid) == inside]

    def process(self, pid: int) -> psutil.Process:
        """Return a process by its pid on the node.

        Raises:
            ProcessLookupError: There is none.
        """
        for process in self.processes():
            if _pid_inside(process.pid) == pid:
                return process
        raise ProcessLookupError(f"{self.name} has no process {pid}")

    def kill_all(self, name: str) -> None:
        """Kill the programs of the node whose name begins with `name`."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if process.name().startswith(name):
                    process.kill()

    def link_down(self) -> None:
        """Disable the node's interface."""
        self.run(["ip", "link", "set", "eth0", "down"], own_environment())

    def power_off(self) -> None:
        """End all processes of the node at once."""
        os.kill(self.pid, signal.SIGKILL)
        for process in self._started:
            process.wait()


class Network:
    def __init__(self, nodes: Sequence[Node], switch: subprocess.Popen[str]) -> None:
        self.nodes = list(nodes)
        self._switch = switch

    def set_links(self, links: Sequence[Link]) -> None:
        """Replace all rules of the switch. They apply when this returns."""
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(links) + "\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline() == "ok\n", "the switch has ended"

    def cut(self, *numbers: int) -> None:
        """Lose all frames between these nodes and the others."""
        others = [node.number for node in self.nodes if node.number not in numbers]
        pairs = [(one, other) for one in numbers for other in others]
        self.set_links(
            [Link(*pair, loss=1.0) for one, other in pairs for pair in ((one, other), (other, one))]
        )

    def heal(self) -> None:
        self.set_links([])


def own_environment(**more: str) -> dict[str, str]:
    """Return an environment for programs of a node, which has a fork server of its own if the tests have
    one."""
    python = Path(sys.executable).parent
    path = [str(python), os.environ.get("PATH", os.defpath)]
    forks = {fork_server.ADDRESS: _FORKS} if fork_server.ADDRESS in os.environ else {}
    if forks:
        path.insert(0, f"{_FORKS}/bin")
    return {
        **os.environ,
        **forks,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": os.pathsep.join([str(fork_server.SITE), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        **more,
    }


@contextmanager
def network(
    count: int,
    shared: Sequence[Path],
    *,
    version: int = 4,
    shm_mb: int = 256,
    tmp_mb: int = 512,
    other_interfaces: Sequence[str] = (),
) -> Iterator[Network]:
    """Make nodes, and end all their processes afterwards.

    Args:
        count: The number of nodes.
        shared: Folders that all nodes see, as on a shared file system.
        version: The version of IP.
        shm_mb: The size of each node's /dev/shm.
        tmp_mb: The size of each node's /tmp.
        other_interfaces: Names of interfaces that lead nowhere, which come before that of the network.
    """
    prefix = ("10.77.0.1", "/24") if version == 4 else ("fd00:77::1", "/64")
    addresses = {f"node{number}": f"{prefix[0]}{number}" for number in range(count)}
    # The interpreter and the repository may be in /tmp, too.
    folders = [str(path.resolve()) for path in (*shared, ROOT, Path(sys.prefix), Path(sys.base_prefix))]

    with ExitStack() as stack:
        nodes, taps = [], []
        for number, (name, address) in enumerate(addresses.items()):
            specification = {
                "name": name,
                "addresses": [address + prefix[1]],
                "hosts": addresses,
                "shared": folders,
                "forks": _FORKS if fork_server.ADDRESS in os.environ else None,
                "shm_mb": shm_mb,
                "tmp_mb": tmp_mb,
                "other_interfaces": list(other_interfaces),
            }
            pid, tap = _start_node(specification, stack)
            nodes.append(Node(number, name, address, pid))
            taps.append(tap)
        switch = subprocess.Popen(
            [sys.executable, "-m", "tests.multinode.switch", *map(str, taps)],
            cwd=ROOT,
            pass_fds=taps,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(_end, switch)
        yield Network(nodes, switch)


def _start_node(specification: dict[str, Any], stack: ExitStack) -> tuple[int, int]:
    """Start a node, and return the pid of its first process and its tap device."""
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, its:
        process = subprocess.Popen(
            [
                *fork_server.PYTHON,
                "-m",
                "tests.multinode.node_process",
                str(its.fileno()),
                json.dumps(specification),
            ],
            cwd=ROOT,
            pass_fds=[its.fileno()],
            stdin=subprocess.PIPE,
            text=True,
        )
        stack.callback(_end, process)
        its.close()
        pid = tap = None
        for _ in range(2):
            message, descriptors, _, _ = socket.recv_fds(own, 100, 1)
            assert message, "the node did not start; the reason is above"
            if descriptors:
                [tap] = descriptors
                stack.callback(os.close, tap)
            else:
                pid = int(message)
    assert pid is not None
    assert tap is not None
    return pid, tap


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def _network_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _pid_inside(pid: int) -> int | None:
    """Return the pid of a process in its own namespace, which is the innermost one."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))
