"""Test that a run that loses a process reports how it ended, and that one that loses a node reports which."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.failure_pages import check_documented

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def told(forked_processes: None) -> dict[str, dict[str, Any]]:
    command = [*fork_server.PYTHON, "-m", "tests.integration.lost_nodes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("how", "summary"),
    [
        ("SIGKILL", "the process ended (killed, out of memory, or crashed)"),
        ("SIGTERM", "the process was ended by SIGTERM"),
        ("SIGSEGV", "the process crashed (SIGSEGV)"),
    ],
)
def test_a_process_says_how_it_ended(how: str, summary: str, told: dict[str, dict[str, Any]]) -> None:
    assert (told[how]["error"], told[how]["kind"], told[how]["summary"]) == ("WorkerError", "death", summary)
    assert "is lost" not in told[how]["page"]
    speaks_of_memory = "killed process" in told[how]["page"]
    assert speaks_of_memory == (how == "SIGKILL"), told[how]["page"]


def test_a_lost_node_is_named(told: dict[str, dict[str, Any]]) -> None:
    node = told["node"]
    assert (node["error"], node["kind"]) == ("WorkerError", "death")
    assert node["summary"].startswith("node ")
    assert node["summary"].endswith("is lost: health check failed due to missing too many heartbeats")
    assert "try     is the node up" in node["page"]
    assert "whoever killed it" not in node["page"]
    assert "checkpoint.every_steps" in node["page"]
    address = node["summary"].split()[1]
    page = node["page"].replace(address, "10.0.0.2")
    if "where   actor rank 1" in page:  # both are on the node, and either may be missed first
        page = re.sub(r"actor rank (\d)", lambda found: f"actor rank {1 - int(found[1])}", page)
    check_documented("node-lost", page)


def test_results_that_the_node_kept_are_lost_with_it(told: dict[str, dict[str, Any]]) -> None:
    assert (told["result"]["error"], told["result"]["kind"]) == ("WorkerError", "death")
    assert "the process or the node that stored it is gone" in told["result"]["summary"]


def test_a_process_of_a_lost_node_does_not_wait_for_it(told: dict[str, dict[str, Any]]) -> None:
    """The program's phase limit is hours."""
    assert (told["start"]["error"], told["start"]["kind"]) == ("WorkerError", "death")
    assert told["start"]["summary"].endswith("cannot start anywhere")


def test_neither_does_a_rollout_replica(told: dict[str, dict[str, Any]]) -> None:
    replica = told["replica"]
    assert replica["error"] == "NodeLostError"
    assert (
        "is lost, and no other node of the cluster has free resources for rollout replica 0 of 1"
        in replica["summary"]
    )
    assert "try     is the node up" in replica["page"]
