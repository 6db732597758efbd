"""docker/compose.yaml beyond its schema, which `make lint` checks: a head, two workers, options that Ray has,
nothing open to others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]


def start_options(service: dict[str, Any]) -> dict[str, Any]:
    """Of `ray start`, as Ray itself reads them; nothing is started. Raises for an option that it does not
    have."""
    program, command, *arguments = service["command"]
    assert (program, command) == ("ray", "start")
    from ray.scripts.scripts import cli  # half a second, which every worker of pytest-xdist would take

    return cli.commands["start"].make_context("start", list(arguments)).params


def test_a_head_and_two_workers_that_join_it(services: dict[str, Any]) -> None:
    assert set(services) == {"head", "worker"}
    head = start_options(services["head"])
    worker = start_options(services["worker"])
    assert head["head"]
    assert head["block"]
    assert worker["address"] == f"head:{head['port']}"
    assert worker["block"]
    assert services["worker"]["deploy"]["replicas"] == 2
    assert services["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}
    assert services["head"]["environment"]["RAY_ADDRESS"] == worker["address"]


def test_all_run_the_image_of_the_cpu_dockerfile_with_one_folder_of_outputs(services: dict[str, Any]) -> None:
    assert (
        ROOT / "docker" / services["head"]["build"]["context"] / services["head"]["build"]["dockerfile"]
    ).is_file()
    assert {service["image"] for service in services.values()} == {"${MEGARL_IMAGE:-megarl:cpu}"}
    assert {tuple(service["volumes"]) for service in services.values()} == {("outputs:/opt/megarl/outputs",)}
    assert "mkdir outputs" in (ROOT / "docker/Dockerfile.cpu").read_text()  # else the volume would be root's


def test_only_this_machine_reaches_the_cluster_and_only_with_the_token(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8265:8265"]
    for service in services.values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        # compose refuses to start without one
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
