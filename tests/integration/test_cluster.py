"""Test several nodes: the processes of a run are where the plan places them, in every placement."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megarl.config.schema import PlacementStrategy
from megarl.plan.placement.plan import plan_placement
from tests import fork_server
from tests.integration.simulated_cluster import DEVICES_PER_NODE, NUM_NODES, STRATEGIES, config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(forked_processes: None) -> dict:
    command = [*fork_server.PYTHON, "-m", "tests.integration.simulated_cluster"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_process_is_where_the_plan_said(strategy: PlacementStrategy, results: dict) -> None:
    plan = plan_placement(config(strategy))
    rows = results[strategy.value]
    assert [(group, rank, node, tuple(devices)) for group, rank, node, devices, _, _ in rows] == [
        (process.group, process.rank, process.node, process.devices) for process in plan.processes
    ]
    pairs = {(node, ray_node) for _, _, node, _, ray_node, _ in rows}
    assert (
        len(pairs)
        == len({node for node, _ in pairs})
        == len({ray_node for _, ray_node in pairs})
        == plan_nodes(strategy)
    )

    # On each node, a device of the plan is one GPU for all its roles.
    gpus: dict[tuple[int, int], set[str]] = {}
    for _, _, node, devices, _, gpu in rows:
        for device in devices:
            gpus.setdefault((node, device), set()).add(gpu)

    assert all(len(names) == 1 for names in gpus.values()), gpus
    assert len({(node, *names) for (node, _), names in gpus.items()}) == len(gpus) == plan.num_devices


def plan_nodes(strategy: PlacementStrategy) -> int:
    return {PlacementStrategy.hybrid: 3, PlacementStrategy.fully_collocate: 2}.get(strategy, NUM_NODES)


def test_what_the_cluster_does_not_have_is_named_node_by_node(results: dict) -> None:
    text = results["too_large"]
    assert "more than the cluster has" in text
    assert "pool 'actor': 2 GPU, 2 CPU on node 0 of the plan" in text
    assert text.count(f"{DEVICES_PER_NODE} GPU, 8 CPU") == NUM_NODES
