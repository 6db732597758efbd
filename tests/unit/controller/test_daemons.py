"""Ray's daemons on one node: slow starts, the object store, and startup failures."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.controller.daemons import (
    AUTH_MODE,
    AUTH_TOKEN,
    OBJECT_STORE_MB,
    NodeStartError,
    add_key,
    last_words,
    object_store_bytes,
    start_patiently,
    too_little_shared_memory,
)
from tests.command import ROOT

# Python runs this file first in every process with its folder on the path: Ray's agents wait until they may
# start.
SLOW_AGENTS = """
import os, sys, time
is_agent = any(name in " ".join(sys.orig_argv) for name in ("dashboard/agent.py", "runtime_env/agent/main.py"))
while is_agent and not os.path.exists(os.environ["MAY_START"]):
    time.sleep(0.1)
"""


@pytest.fixture
def slow_agents(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return an environment in which none of Ray's agents starts before the test has ended."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    may_start = tmp_path / "may_start"
    yield {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "MAY_START": str(may_start)}
    may_start.touch()


def test_a_node_comes_up_though_its_agents_do_not(slow_agents: dict[str, str]) -> None:
    """Ray's default is to end such a node after 15 s."""
    slow_agents.pop("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", None)
    command = [
        sys.executable,
        "-m",
        "megarl.cli.launch.ray_node",
        "--address",
        "127.0.0.1",
        "--num-cpus",
        "1",
    ]

    with subprocess.Popen(
        command, cwd=ROOT, env=slow_agents, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as node:
        assert node.stdout is not None
        address = node.stdout.readline().strip()
        commands = [" ".join(each.cmdline()) for each in psutil.Process(node.pid).children(recursive=True)]
        node.communicate()

    assert address.startswith("127.0.0.1:")
    assert [each for each in commands if "agent" in each and "--raylet_socket_name" not in each], commands
    [raylet] = [each for each in commands if "--raylet_socket_name" in each]
    assert f"--object_store_memory={OBJECT_STORE_MB * 2**20} " in raylet
    assert "ray.dashboard" not in raylet  # no job server, so the small agent
    assert "--minimal" in raylet


def test_a_start_that_timed_out_is_tried_once_more() -> None:
    told: list[str] = []
    failures = [
        NodeStartError(
            "Ray did not start: The current node timed out during startup.\n  raylet.out: [C] the cause"
        )
    ]

    def start() -> str:
        if failures:
            raise failures.pop()
        return "up"

    assert start_patiently(start, told.append) == "up"
    [text] = told
    assert "the cause\nstarting Ray again (attempt 2 of 2)" in text


@pytest.mark.parametrize(
    ("message", "attempts"), [("The current node timed out during startup.", 2), ("no such address", 1)]
)
def test_what_does_not_start_raises_its_cause(message: str, attempts: int) -> None:
    tried: list[str] = []

    def start() -> None:
        tried.append(message)
        raise NodeStartError(message)

    with pytest.raises(NodeStartError, match=message):
        start_patiently(start, lambda text: None)
    assert len(tried) == attempts


def test_the_last_severe_lines_of_the_daemons_are_the_cause(tmp_path: Path) -> None:
    assert last_words(None) == []
    (tmp_path / "raylet.out").write_text(
        "[2026-01-02 03:04:05,678 I 10 10] (raylet) main.cc:1: a step\n"
        "[2026-01-02 03:04:05,678 E 10 10] (raylet) main.cc:2: first\n"
        "[2026-01-02 03:04:05,678 C 10 10] (raylet) node_manager.cc:3: Check failed: Timed out waiting for "
        "file\n"
        "*** StackTrace Information ***\n"
    )
    (tmp_path / "gcs_server.out").write_text(
        "[2026-01-02 03:04:05,678 W 9 9] (gcs_server) a.cc:1: a warning\n"
    )
    (tmp_path / "dashboard_agent.out").write_text(
        "[2026-01-02 03:04:05,678 E 8 8] not a daemon without which a node does not start\n"
    )
    first, second = last_words(str(tmp_path))
    assert first.endswith("main.cc:2: first")
    assert second == f"  {tmp_path / 'raylet.out'}: " + (
        "[2026-01-02 03:04:05,678 C 10 10] (raylet) node_manager.cc:3: Check failed: Timed out waiting for "
        "file"
    )


def test_the_object_store_has_one_size_and_the_users_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", raising=False)
    assert object_store_bytes() == OBJECT_STORE_MB * 2**20
    assert object_store_bytes(100) == 100 * 2**20
    monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", "123456789")
    assert object_store_bytes() == 123456789


def test_shared_memory_that_is_too_small_is_said(tmp_path: Path) -> None:
    assert too_little_shared_memory(1, str(tmp_path)) is None
    assert f"{tmp_path} has " in str(too_little_shared_memory(2**60, str(tmp_path)))
    assert "absent has 0 MiB free, less than the 1 MiB" in str(
        too_little_shared_memory(2**20, str(tmp_path / "absent"))
    )


def test_a_key_is_made_where_the_user_gave_none() -> None:
    environment: dict[str, str] = {}
    assert add_key(environment) == [AUTH_MODE, AUTH_TOKEN]
    assert environment[AUTH_MODE] == "token"
    assert len(environment[AUTH_TOKEN]) == 64

    for given in (
        {AUTH_MODE: "disabled"},
        {AUTH_MODE: "token", AUTH_TOKEN: "own"},
        {AUTH_MODE: "token", "RAY_AUTH_TOKEN_PATH": "file"},
    ):
        unchanged = dict(given)
        assert add_key(unchanged) == []
        assert unchanged == given
