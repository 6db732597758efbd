"""Test what a driver is told when nodes of its cluster vanish, and that replicas move to a spare node."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.multinode.nodes import Link, Network, missing, network
from tests.multinode.ray_nodes import RayNodes, ray_nodes

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
# Five questions without an answer for 2 s: a node that no longer answers is noticed after about 12 s.
NOTICED_SOON = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "5",
    "RAY_health_check_timeout_ms": "2000",
}
SUM = sum(range(1_000_000))


class Cluster:
    """A driver on node 0, an actor with a replica and another replica on two other nodes. The last one is spare."""

    def __init__(self, net: Network, ray: RayNodes, shared: Path) -> None:
        self.net = net
        self.ray = ray
        with (shared / "driver.log").open("w") as log:
            program = [*fork_server.PYTHON, "-m", "tests.multinode.driver", str(shared)]
            self._driver = net.nodes[0].start(
                program, ray.environment, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self._driver.stdout is not None
        assert self._driver.stdout.readline() == "ready\n", (shared / "driver.log").read_text()

    def send(self, command: str) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write(command + "\n")
        self._driver.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if line.startswith("{"):  # Ray prints messages, too
                return json.loads(line)
        raise AssertionError("the driver has ended")

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.hear()

    def number_of(self, address: str) -> int:
        [number] = [node.number for node in self.net.nodes if node.address == address]
        return number

    def end(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait()


@pytest.fixture(scope="module")
def told(forked_processes: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the driver says while the network is disturbed and nodes vanish, one after another."""
    shared = tmp_path_factory.mktemp("cluster")
    said: dict[str, dict[str, Any]] = {}
    # Each process takes two CPUs, so the driver's node holds none.
    with network(4, [shared]) as net, ray_nodes(net, [1, 4, 4, 4], shared, NOTICED_SOON) as ray:
        cluster = Cluster(net, ray, shared)
        said["places"] = cluster.ask("places")
        actor = cluster.number_of(said["places"]["actor"])
        replica = cluster.number_of(said["places"]["replicas"][1])
        [spare] = {1, 2, 3} - {actor, replica}

        net.set_links([Link(0, actor, delay_s=0.1), Link(actor, 0, delay_s=0.1)])
        said["delay"] = cluster.ask("call")
        net.set_links([Link(0, actor, loss=0.05), Link(actor, 0, loss=0.05)])
        said["loss"] = cluster.ask("call")
        net.cut(actor)
        cluster.send("call")
        time.sleep(1.0)
        net.heal()
        said["partition"] = cluster.hear()

        net.cut(replica)
        said["replica"] = cluster.ask("collect")
        said["moved"] = cluster.ask("restart")
        said["new replica"] = cluster.ask("collect")
        net.cut(replica, spare)
        said["replica again"] = cluster.ask("collect")
        said["no node"] = cluster.ask("restart")
        net.heal()
        ray.start(replica)
        said["returned"] = cluster.ask("restart")
        ray.start(spare)
        said["excluded"] = cluster.ask("exclude")

        cluster.send("wait")
        net.set_links([Link(actor, number, loss=1.0) for number in range(4)])
        said["actor"] = cluster.hear()
        cluster.end()
    return said


def address_of(number: int) -> str:
    return f"10.77.0.1{number}"


def test_processes_are_on_the_nodes_of_the_plan(told: dict[str, dict[str, Any]]) -> None:
    places = told["places"]
    assert places["replicas"][0] == places["actor"]
    assert places["replicas"][1] != places["actor"]
    assert address_of(0) not in {places["actor"], *places["replicas"]}


@pytest.mark.parametrize("disturbance", ["delay", "loss", "partition"])
def test_a_call_survives_a_disturbed_network(disturbance: str, told: dict[str, dict[str, Any]]) -> None:
    assert told[disturbance]["error"] is None
    assert told[disturbance]["sum"] == SUM
    if disturbance == "delay":
        assert told[disturbance]["seconds"] >= 0.2
    if disturbance == "partition":
        assert told[disturbance]["seconds"] >= 1.0


def test_a_replica_moves_to_a_spare_node(told: dict[str, dict[str, Any]]) -> None:
    before, after = told["places"], told["moved"]
    lost = before["replicas"][1]
    assert (told["replica"]["error"], told["replica"]["node"]) == ("WorkerError", lost)
    assert f"node {lost} is lost" in told["replica"]["summary"]

    assert after["error"] is None
    [spare] = {address_of(number) for number in (1, 2, 3)} - {before["actor"], lost}
    assert after["replicas"] == [before["actor"], spare]
    assert after["actor"] == before["actor"]
    # The replica on the other node of the pool keeps its process.
    assert after["pids"][0] == before["pids"][0]
    assert told["new replica"]["versions"] == [None, None]


def test_a_replica_without_another_node_ends_the_run(told: dict[str, dict[str, Any]]) -> None:
    """The driver says so when the node is known to be lost, without waiting for a new one."""
    assert told["replica again"]["node"] == told["moved"]["replicas"][1]
    lost = told["no node"]
    assert lost["error"] == "NodeLostError"
    assert (
        f"node {told['moved']['replicas'][1]} is lost: rollout replica 1 of 2 ran there, and no other node of the "
        "cluster has free resources for it"
    ) in lost["summary"]
    assert "try     is the node up" in lost["page"]


def test_a_node_that_has_returned_is_used(told: dict[str, dict[str, Any]]) -> None:
    assert told["returned"]["error"] is None
    assert told["returned"]["replicas"] == told["places"]["replicas"]


def test_an_excluded_node_is_left_for_a_free_one(told: dict[str, dict[str, Any]]) -> None:
    after = told["excluded"]
    assert after["error"] is None
    assert after["replicas"] == told["moved"]["replicas"]
    assert (after["moved"], after["on_excluded"]) == ([True, True], [])


def test_a_node_that_hears_but_does_not_answer_is_lost(told: dict[str, dict[str, Any]]) -> None:
    lost = told["actor"]
    assert (lost["error"], lost["node"]) == ("WorkerError", told["places"]["actor"])
    assert f"node {told['places']['actor']} is lost" in lost["summary"]
    assert "try     is the node up" in lost["page"]
