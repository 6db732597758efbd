"""A Ray cluster with one node per node of a network, each started as the launchers start theirs."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from megarl.controller.daemons import add_key
from tests import fork_server
from tests.multinode.nodes import Network, own_environment

OWN_SETTINGS = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(100 * 2**20)}


class RayNodes:
    """The daemons of a cluster. `environment` is that of its drivers: it has the cluster's address and key."""

    def __init__(
        self, net: Network, num_cpus: Sequence[int], folder: Path, settings: Mapping[str, str]
    ) -> None:
        self._net = net
        self._num_cpus = num_cpus
        self._folder = folder
        self._daemons: list[subprocess.Popen[str]] = []
        self.environment = own_environment(**OWN_SETTINGS, **settings)
        add_key(self.environment)
        self.address = _address(*self._started(0, []))
        # The others start at the same time.
        starting = [self._started(node.number, ["--head", self.address]) for node in net.nodes[1:]]
        for daemon, log in starting:
            assert _address(daemon, log) == self.address
        self.environment["RAY_ADDRESS"] = self.address

    def start(self, number: int) -> None:
        """Let a node join again."""
        assert _address(*self._started(number, ["--head", self.address])) == self.address

    def _started(self, number: int, arguments: list[str]) -> tuple[subprocess.Popen[str], Path]:
        node = self._net.nodes[number]
        program = [*fork_server.PYTHON, "-m", "megarl.cli.launch.ray_node", "--address", node.address]
        log = self._folder / f"ray-{node.name}.log"
        with log.open("a") as output:
            daemon = node.start(
                [*program, "--num-cpus", str(self._num_cpus[number]), *arguments],
                self.environment,
                output,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        self._daemons.append(daemon)
        return daemon, log

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            assert daemon.stdin is not None
            daemon.stdin.close()
            daemon.wait()


def _address(daemon: subprocess.Popen[str], log: Path) -> str:
    """Wait until a node has joined, and return the address of its cluster."""
    assert daemon.stdout is not None
    address = daemon.stdout.readline().strip()
    assert address, log.read_text()
    return address


@contextmanager
def ray_nodes(
    net: Network, num_cpus: Sequence[int], folder: Path, settings: Mapping[str, str] | None = None
) -> Iterator[RayNodes]:
    """Start the cluster. The daemons' output goes to `folder`.

    Args:
        net: Its nodes; the first is the head.
        num_cpus: The number of logical CPUs of each node, in order.
        folder: The folder for logs.
        settings: Environment variables of the daemons and of drivers.
    """
    nodes = RayNodes(net, num_cpus, folder, settings or {})
    try:
        yield nodes
    finally:
        net.heal()
        nodes.stop()
