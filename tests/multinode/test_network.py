"""Test the nodes themselves: what they share, and what the switch loses and delays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.multinode.nodes import Link, Network, missing, network, own_environment
from tests.processes import gone_within

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
ECHO = """
import socket, sys
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind((sys.argv[1], 7000))
print("ready", flush=True)
with open(sys.argv[2], "w") as heard:
    while True:
        text, sender = receiver.recvfrom(100)
        print(text.decode(), file=heard, flush=True)
        receiver.sendto(text, sender)
"""
ASK = """
import json, socket, sys, time
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.settimeout(0.5)
begin_s = time.monotonic()
sender.sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
try:
    sender.recv(100)
    print(time.monotonic() - begin_s)
except TimeoutError:
    print("inf")
"""
SEND_MANY = """
import socket, sys, time
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(200):
    sender.sendto(b"many", (sys.argv[1], 7000))
    time.sleep(0.001)
"""
OWN = """
import json, os, pathlib, socket, sys
names = {"host": socket.gethostname(), "address": socket.gethostbyname(socket.gethostname())}
pathlib.Path("/tmp/own").write_text(names["host"])
pathlib.Path("/dev/shm/own").write_text(names["host"])
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
shared = pathlib.Path(sys.argv[1]).read_text()
print(json.dumps({**names, "most_pid": max(pids), "shm_mb": os.statvfs("/dev/shm").f_blocks * 4096 >> 20,
                  "shared": shared, "interfaces": [name for _, name in socket.if_nameindex()]}))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "file").write_text("seen by all")
    return folder


@pytest.fixture(scope="module")
def net(shared: Path) -> Iterator[Network]:
    with network(3, [shared], other_interfaces=["docker0"]) as made:
        for node in made.nodes:
            echo = node.start(
                [sys.executable, "-c", ECHO, node.address, str(shared / f"heard-{node.number}")],
                own_environment(),
                stdout=subprocess.PIPE,
            )
            assert echo.stdout is not None
            assert echo.stdout.readline() == "ready\n"
        yield made


@pytest.fixture(autouse=True)
def healed(net: Network) -> Iterator[None]:
    yield
    net.heal()


def round_trip_s(net: Network, source: int, target: int, text: str = "-") -> float:
    command = [sys.executable, "-c", ASK, net.nodes[target].address, text]
    return float(net.nodes[source].run(command, own_environment()))


def test_a_node_has_its_own_name_address_processes_and_memory(net: Network, shared: Path) -> None:
    for node in net.nodes:
        command = [sys.executable, "-c", OWN, str(shared / "file")]
        found = json.loads(node.run(command, own_environment()))
        assert found["host"] == f"node{node.number}"
        assert found["address"] == node.address == f"10.77.0.1{node.number}"
        assert found["most_pid"] < 100
        assert found["shm_mb"] == 256
        assert found["shared"] == "seen by all"
        assert found["interfaces"] == ["lo", "docker0", "eth0"]
    assert not Path("/tmp/own").exists()
    assert not Path("/dev/shm/own").exists()


def test_only_the_links_of_a_cut_node_are_cut(net: Network) -> None:
    assert round_trip_s(net, 0, 1) < float("inf")
    net.cut(1)
    assert round_trip_s(net, 0, 1) == float("inf")
    assert round_trip_s(net, 1, 2) == float("inf")
    assert round_trip_s(net, 0, 2) < float("inf")
    net.heal()
    assert round_trip_s(net, 0, 1) < float("inf")


def test_one_direction_can_be_cut(net: Network, shared: Path) -> None:
    round_trip_s(net, 0, 1)
    net.set_links([Link(1, 0, loss=1.0)])
    assert round_trip_s(net, 0, 1, "arrives without an answer") == float("inf")
    assert "arrives without an answer" in (shared / "heard-1").read_text()
    net.set_links([Link(0, 1, loss=1.0)])
    assert round_trip_s(net, 0, 1, "does not arrive") == float("inf")
    assert "does not arrive" not in (shared / "heard-1").read_text()


def test_delays_apply_in_their_direction(net: Network) -> None:
    round_trip_s(net, 0, 1)
    net.set_links([Link(0, 1, delay_s=0.05), Link(1, 0, delay_s=0.15)])
    assert 0.2 <= round_trip_s(net, 0, 1) < float("inf")
    net.set_links([Link(0, 1, delay_s=0.05)])
    assert 0.05 <= round_trip_s(net, 0, 1) < float("inf")


def test_a_lossy_link_drops_its_share_of_frames(net: Network, shared: Path) -> None:
    round_trip_s(net, 0, 2)
    net.set_links([Link(0, 2, loss=0.3)])
    net.nodes[0].run([sys.executable, "-c", SEND_MANY, net.nodes[2].address], own_environment())
    net.heal()
    round_trip_s(net, 0, 2, "end")
    heard = (shared / "heard-2").read_text().split()
    assert 110 <= heard.count("many") <= 170  # 140 of 200, with a fixed seed but for other frames


def test_a_node_without_power_has_no_process(shared: Path) -> None:
    with network(1, [shared]) as made:
        [node] = made.nodes
        sleeping = node.start(["sleep", "1000"], own_environment())
        [outside] = psutil.Process(sleeping.pid).children() or [psutil.Process(sleeping.pid)]
        node.power_off()
        assert gone_within([outside], 20) == []
