"""Test a run that torchrun starts on two nodes, whose network is as unusual as real ones are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema import SFTConfig
from tests import fork_server
from tests.integration.launched_run import save_sft_run
from tests.integration.tiny_run import run_sft
from tests.multinode.nodes import missing, network, own_environment
from tests.multinode.ray_nodes import OWN_SETTINGS

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
SAME = ("sft/loss", "sft/grad_norm", "val/loss", "num_tokens")


def metrics(run: Path) -> list[list[float | None]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line.get(name) for name in SAME] for line in lines]


def test_a_run_over_ipv6_equals_one_on_a_single_node(ray_cluster: None, tmp_path: Path) -> None:
    """The nodes have IPv6 only, another interface before that of the network, and a small /dev/shm."""
    config = save_sft_run(tmp_path)
    with network(2, [tmp_path], version=6, other_interfaces=["docker0"], shm_mb=64) as net:
        launched = []
        for node in net.nodes:
            meeting = ["--master-addr", net.nodes[0].address, "--master-port", "29500"]
            torchrun = [*fork_server.PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "1", *meeting]
            command = [
                "--nnodes",
                "2",
                "--node-rank",
                str(node.number),
                "-m",
                "megarl",
                "launch",
                str(config),
            ]
            with (tmp_path / f"{node.name}.log").open("w") as log:
                environment = own_environment(**OWN_SETTINGS)
                launched.append(
                    node.start([*torchrun, *command], environment, log, stdin=subprocess.DEVNULL, stdout=log)
                )
        statuses = [process.wait() for process in launched]
    said = (tmp_path / "node0.log").read_text()
    assert statuses == [0, 0], said
    assert "2 nodes joined, Ray is at [fd00:77::10]:" in said
    assert "/dev/shm has 64 MiB free, less than the 100 MiB of Ray's object store" in said

    on_one_node = ["placement.num_nodes=1", "placement.devices_per_node=2"]
    run_sft(load_config(SFTConfig, str(config), [*on_one_node, f"trainer.output_dir={tmp_path / 'alone'}"]))
    assert len(metrics(tmp_path / "run")) == 4
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")
    weights = [
        (tmp_path / run / "huggingface" / "model.safetensors").read_bytes() for run in ("run", "alone")
    ]
    assert weights[0] == weights[1]
