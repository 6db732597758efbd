"""Starting and joining a cluster: what is refused, and quickly."""

import os
import socket
import subprocess
import sys
import time

import psutil
import pytest
import ray

from megarl.controller.cluster import start_ray
from megarl.machine.ray_address import cluster_address
from tests import fork_server
from tests.failure_pages import check_documented


def test_values_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="num_cpus=0 must be at least 1"):
        start_ray(num_cpus=0)
    with pytest.raises(ValueError, match="object_store_mb=10 at least 80"):
        start_ray(num_cpus=1, object_store_mb=10)


def test_it_runs_once_and_listens_to_this_machine_only(ray_cluster: None) -> None:
    with pytest.raises(ValueError, match="Ray is already running in this process"):
        start_ray(num_cpus=1)
    listening = [
        one.laddr.ip
        for daemon in ray_daemons()
        for one in daemon.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3
    assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_who_has_no_key_is_refused(ray_cluster: None) -> None:
    """Applies on a single machine too, where other users can reach loopback."""
    address = ray.get_runtime_context().gcs_address
    program = (
        f"from ray._raylet import GcsClient; "
        f"print(GcsClient(address='{address}').internal_kv_keys(b'', namespace=None, timeout=60))"
    )
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}

    for environment in (without, {**without, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode != 0
        assert "AuthenticationError" in done.stderr, done.stderr


def ray_daemons() -> list[psutil.Process]:
    living = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    ]
    return [process for process in living if process.name() in ("gcs_server", "raylet")]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:{free}", "does not answer"),
        ("[::1]:{free}", "does not answer"),
        ("ray://head:10001", "does not connect as a Ray client; submit the run as a Ray job"),
        ("http://head:8265", "must run inside the cluster"),
        ("head", "RAY_ADDRESS=head is not of the form HOST:PORT"),
        ("head:gcs", "RAY_ADDRESS=head:gcs is not of the form HOST:PORT"),
        ("head:70000", "RAY_ADDRESS=head:70000 is not of the form HOST:PORT"),
        (":6379", "RAY_ADDRESS=:6379 is not of the form HOST:PORT"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.controller.cluster.ray.is_initialized", lambda: False)
    with socket.socket() as unused:  # bound but not listening, so nothing answers
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", address.format(free=unused.getsockname()[1]))
        with pytest.raises(ValueError, match=message):
            start_ray(num_cpus=1)


def test_a_cluster_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.controller.cluster.ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a port that is never assigned
    with pytest.raises(ValueError, match="or unset RAY_ADDRESS") as caught:
        start_ray(num_cpus=1)
    check_documented("ray-does-not-answer", f"megarl train: {caught.value}")


@pytest.mark.parametrize("value", ["local", " local ", "", None])
def test_local_is_a_ray_of_its_own(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if value is not None:
        monkeypatch.setenv("RAY_ADDRESS", value)
    assert cluster_address() is None


def test_a_run_with_local_has_the_processors_it_asks_for(forked_processes: None) -> None:
    """Ray's default for such a cluster is the number of CPUs of the machine.

    After the node, no process is left that keeps the memory of its workers.
    """
    program = (
        "import os, ray; from megarl.controller.cluster import *; "
        "from tests.fork_server.client import node_address; "
        "start_ray(num_cpus=37); server = ray.get(ray.remote(lambda: node_address('node')).remote()); "
        "assert os.path.exists(server); print(ray.cluster_resources()['CPU'], server); shutdown()"
    )
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [*fork_server.PYTHON, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    num_cpus, server = done.stdout.split()
    assert num_cpus == "37.0", done.stderr
    deadline_s = time.monotonic() + 60
    while os.path.exists(server):
        assert time.monotonic() < deadline_s, "the server of a node outlived it"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "no Ray cluster runs on this machine"),
        (
            "127.0.0.1:1",
            "RAY_ADDRESS=auto: 127.0.0.1:1, the cluster that was last started here, does not answer",
        ),
    ],
)
def test_auto_without_a_cluster_that_answers(
    found: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.controller.cluster.ray.is_initialized", lambda: False)
    monkeypatch.setattr(
        "megarl.controller.cluster.services.canonicalize_bootstrap_address", lambda address: found
    )
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ValueError, match=message):
        start_ray(num_cpus=1)
