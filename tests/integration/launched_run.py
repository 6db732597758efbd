"""Fixtures of the launcher tests: runs as files, and two Ray nodes on loopback with a job server."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from megarl.config.load import dump_config
from megarl.config.schema import (
    ParallelConfig,
    PlacementConfig,
)
from tests import fork_server
from tests.command import ROOT
from tests.integration.tiny_run import save_inputs, tiny_config, tiny_sft_config

STEPS = 3
FAILING_REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
    "extra_info['answer']\n"
)
_STORE_BYTES = str(100 * 2**20)


def save_ppo_run(folder: Path) -> Path:
    """Save a run with actor and rollout on one node and the critic on another. The run's own folder is
    `folder/run`; `failing.py` is a reward that raises."""
    save_inputs(folder)
    (folder / "failing.py").write_text(FAILING_REWARD)
    config = tiny_config(
        folder,
        folder / "run",
        data={"val_files": []},
        rollout={"n": 1, "restart_limit": 0},
        placement=PlacementConfig(num_nodes=2, devices_per_node=2),
        trainer={"total_steps": STEPS, "prompts_per_step": 8, "validate_before": False},
    )
    dump_config(config, path := folder / "run.yaml")

    return path


def save_sft_run(folder: Path) -> Path:
    """Save a run with two replicas on separate nodes, an odd number of samples, validation and
    checkpoints."""
    save_inputs(folder)
    config = tiny_sft_config(
        folder,
        folder / "run",
        actor={"parallel": ParallelConfig(data_parallel_size=2)},
        placement=PlacementConfig(num_nodes=2, devices_per_node=1),
        trainer={"total_steps": 4},
    )
    dump_config(config, path := folder / "sft.yaml")

    return path


def environment(**more: str) -> dict[str, str]:
    """Return an environment with this repository's code and interpreter, for commands that start `python`."""
    own = {
        "PATH": fork_server.search_path(),
        "PYTHONPATH": str(ROOT),
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": _STORE_BYTES,
    }
    return {**os.environ, **own, **more}


def free_port() -> int:
    """Return a free port below the ephemeral range, so that it is still free seconds later."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ClusterAddress(NamedTuple):
    gcs: str  # value for RAY_ADDRESS
    jobs: str  # address of its job server


@contextmanager
def two_node_cluster(env: dict[str, str]) -> Iterator[ClusterAddress]:
    port = free_port()
    node = [
        *fork_server.PYTHON,
        "-m",
        "megarl.cli.launch.ray_node",
        "--address",
        "127.0.0.1",
        "--num-cpus",
        "8",
    ]
    nodes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        nodes.append(
            subprocess.Popen(
                [*node, *arguments],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert nodes[-1].stdout is not None
        return nodes[-1].stdout.readline().strip()

    # Separate per node: the agent of one node removes a job's files when its own node no longer needs them.
    # Short, because it contains sockets.
    with (
        tempfile.TemporaryDirectory(prefix="ray") as first,
        tempfile.TemporaryDirectory(prefix="ray") as second,
    ):
        try:
            gcs_address = start("--dashboard-port", str(port), "--temp-dir", first)
            assert start("--head", gcs_address, "--temp-dir", second) == gcs_address
            yield ClusterAddress(gcs_address, f"http://127.0.0.1:{port}")
        finally:
            alive = [psutil.Process(process.pid) for process in nodes if process.poll() is None]
            daemons = [child for process in alive for child in process.children(recursive=True)]
            for process in reversed(nodes):
                process.communicate(timeout=60)
            # A process that outlives its node for a moment would write to a folder that is being removed.
            psutil.wait_procs(daemons, timeout=60)
