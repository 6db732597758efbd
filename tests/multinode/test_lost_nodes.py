"""Test what a driver is told when nodes of its cluster vanish, and that processes move to a spare node."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import fork_server
from tests.multinode.first_node import IN_SCORING, IN_TRAINING
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


class Cluster(NamedTuple):
    """Node 0 is the head, without a process of a run. `shared` is a folder that all nodes see."""

    net: Network
    ray: RayNodes
    shared: Path


@pytest.fixture(scope="module")
def cluster(forked_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shared = tmp_path_factory.mktemp("cluster")
    with network(4, [shared]) as net, ray_nodes(net, [0, 4, 4, 4], shared, NOTICED_SOON) as ray:
        yield Cluster(net, ray, shared)


class Driver:
    """A program on node 0 that writes JSON."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.log = cluster.shared / f"{name}.log"
        with self.log.open("w") as log:
            program = [*fork_server.PYTHON, "-m", f"tests.multinode.{name}", str(cluster.shared)]
            self._driver = cluster.net.nodes[0].start(
                program, cluster.ray.environment, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    def send(self, command: str) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.write(command + "\n")
        self._driver.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if line.startswith("{"):  # Ray prints messages, too
                return json.loads(line)
        raise AssertionError(self.log.read_text()[-3000:])

    def ask(self, command: str) -> dict[str, Any]:
        self.send(command)
        return self.hear()

    def end(self) -> None:
        assert self._driver.stdin is not None
        self._driver.stdin.close()
        self._driver.wait()


@pytest.fixture(scope="module")
def told(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What a driver says while the network is disturbed and nodes vanish, one after another.

    An actor with a replica is on one node, and another replica on a second one. The third is spare.
    """
    net, ray, _ = cluster
    driver = Driver(cluster, "driver")
    said: dict[str, dict[str, Any]] = {}
    said["places"] = driver.ask("places")
    actor = number_of(said["places"]["actor"])
    replica = number_of(said["places"]["replicas"][1])
    [spare] = {1, 2, 3} - {actor, replica}

    net.set_links([Link(0, actor, delay_s=0.1), Link(actor, 0, delay_s=0.1)])
    said["delay"] = driver.ask("call")
    net.set_links([Link(0, actor, loss=0.05), Link(actor, 0, loss=0.05)])
    said["loss"] = driver.ask("call")
    net.cut(actor)
    driver.send("call")
    time.sleep(1.0)
    net.heal()
    said["partition"] = driver.hear()

    net.cut(replica)
    said["replica"] = driver.ask("collect")
    said["moved"] = driver.ask("restart")
    said["new replica"] = driver.ask("collect")
    net.cut(replica, spare)
    said["replica again"] = driver.ask("collect")
    said["no node"] = driver.ask("restart")
    net.heal()
    ray.start(replica)
    said["returned"] = driver.ask("restart")
    ray.start(spare)
    said["excluded"] = driver.ask("exclude")

    driver.send("wait")
    net.set_links([Link(actor, number, loss=1.0) for number in range(4)])
    said["actor"] = driver.hear()
    driver.end()
    return said


def address_of(number: int) -> str:
    return f"10.77.0.1{number}"


def number_of(address: str) -> int:
    return int(address.removeprefix("10.77.0.1"))


def test_a_run_that_loses_its_first_node_ends_like_one_that_does_not(cluster: Cluster) -> None:
    """Each time, the lost node has a rank of the actor and the reward functions, and another one replaces it."""
    net, ray, shared = cluster
    driver = Driver(cluster, "first_node")
    scoring = driver.hear()
    [first] = {number_of(address) for address in scoring["nodes"]}
    while not (shared / "scoring").exists():
        time.sleep(0.01)
    net.nodes[first].kill_all("raylet")

    training = driver.hear()
    [second] = {number_of(address) for address in training["nodes"]}
    assert second != first
    ray.start(first)
    # The update cannot end without this rank.
    rank = net.nodes[second].process(training["pid"])
    rank.suspend()
    assert driver.ask("continue") == {"step": IN_TRAINING}
    net.nodes[second].kill_all("raylet")

    found = driver.hear()
    driver.end()
    rank.kill()
    ray.start(second)
    assert found["difference"] == []
    assert found["num_recoveries"] == [None, 0, 1, 1, 0]  # the first line is a validation
    messages = driver.log.read_text()
    losses = [
        f"reward rank 0 (node {address_of(first)}, ",
        f"lost: step {IN_SCORING}, node {address_of(first)}: actor rank 0",
        f"lost: step {IN_TRAINING}, node {address_of(second)}: actor rank 0",
        f"reward rank 0 (node {address_of(second)}, ",
    ]
    assert sorted(losses, key=messages.index) == losses
    assert messages.count("the process of the role reward is restarted") == 2


def test_environments_and_judges_move_to_other_nodes(cluster: Cluster) -> None:
    """The lost node has them and the reward functions, and both are answering. Models are on another one."""
    net, ray, shared = cluster
    driver = Driver(cluster, "moved_processes")
    before = driver.hear()["nodes"]
    lost = before["environment"]
    assert {role for role, node in before.items() if node == lost} == {
        "environment",
        "judge_length",
        "reward",
    }
    while not (shared / "moved" / "judging").exists():
        time.sleep(0.01)
    net.nodes[number_of(lost)].kill_all("raylet")

    after = driver.hear()["nodes"]
    found = driver.hear()
    driver.end()
    ray.start(number_of(lost))
    assert found["difference"] == []
    assert lost not in after.values()
    assert after["actor"] == before["actor"]


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
        f"node {told['moved']['replicas'][1]} is lost, and no other node of the cluster has free resources for "
        "rollout replica 1 of 2 (1 process on 1 node)"
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
