"""Test the launchers as a user runs them: Ray job submission to two nodes, and torchrun with two nodes."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from safetensors.torch import load_file, save_file

from megarl.cli.main import main
from megarl.config.load import load_config
from megarl.config.schema import SFTConfig
from tests.command import ROOT, Command
from tests.integration.launched_run import (
    STEPS,
    ClusterAddress,
    environment,
    free_port,
    save_ppo_run,
    save_sft_run,
    two_node_cluster,
)
from tests.integration.tiny_run import run_sft
from tests.processes import gone_within

TORCHRUN = ["-m", "torch.distributed.run"]
WITHOUT_CRITIC = ("algorithm.advantage.estimator=rloo", "rollout.n=2")  # one process less to start
SAME_LOSS = ("sft/loss", "sft/grad_norm", "sft/lr", "val/loss", "num_tokens")


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- Ray job submission


@pytest.fixture(scope="module")
def env(forked_processes: None) -> dict[str, str]:
    return environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))


@pytest.fixture(scope="module")
def nodes(env: dict[str, str]) -> Iterator[ClusterAddress]:
    """Start the nodes while another program occupies the port that Ray's agents prefer: the head must still
    accept jobs."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # another test's program already has it
            other.bind(("127.0.0.1", DEFAULT_DASHBOARD_AGENT_LISTEN_PORT))
            other.listen()
        with two_node_cluster(env) as address:
            yield address


@pytest.fixture(scope="module")
def cluster(nodes: ClusterAddress) -> str:
    return nodes.jobs


def submit(address: str, env: dict[str, str], config: Path, *arguments: str) -> Command:
    command = ["-m", "megarl", "submit", "--address", address, str(config)]
    return Command([*command, *arguments], config.with_name("submit.log"), env)


def test_a_submitted_run_trains_and_its_status_is_the_commands(
    cluster: str, env: dict[str, str], tmp_path: Path
) -> None:
    job = submit(cluster, env, save_ppo_run(tmp_path))
    assert job.status() == 0, job.said()
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert "PPO run" in job.said()  # the last table of the log


def test_a_submitted_run_that_fails_shows_its_first_cause(
    cluster: str, env: dict[str, str], tmp_path: Path
) -> None:
    config = save_sft_run(tmp_path)
    tensors = load_file(file := tmp_path / "policy" / "model.safetensors")

    # Finite weights, as a folder must have, whose products with normalized inputs overflow.
    weight = tensors["model.layers.3.self_attn.q_proj.weight"]
    weight.fill_(torch.finfo(weight.dtype).max)
    save_file(tensors, file, {"format": "pt"})
    job = submit(cluster, env, config)
    assert job.status() == 1, job.said()
    assert "TrainingDivergedError" in job.said()
    assert "actor rank" in job.said()  # the cause is in a worker


def test_what_is_wrong_is_said_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = save_ppo_run(tmp_path)
    nobody = f"http://127.0.0.1:{free_port()}"
    assert main(["submit", "--address", nobody, str(config), "actor.optm.lr=1"]) == 2
    assert "did you mean actor.optim" in capsys.readouterr().err
    assert main(["submit", "--address", nobody, str(config)]) == 2
    assert f"no job server responds at {nobody}" in capsys.readouterr().err


def test_a_run_is_submitted_from_a_machine_without_its_model_and_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the code must be here, since the job uploads it."""
    config = save_ppo_run(tmp_path)
    nobody = f"http://127.0.0.1:{free_port()}"

    for file in (tmp_path / "policy").iterdir():
        if file.name != "config.json":
            file.unlink()

    (tmp_path / "train.parquet").unlink()
    assert main(["submit", "--address", nobody, str(config)]) == 2
    out, err = capsys.readouterr()
    assert f"no job server responds at {nobody}" in err
    listed = [line.split(": ")[1] for line in out.splitlines() if line.startswith("not on this machine: ")]
    assert {"model.path", "data.train_files"} <= set(listed)
    (tmp_path / "reward.py").unlink()
    assert main(["submit", "--address", nobody, str(config)]) == 2
    assert re.search(r"1 problem\n.*reward.functions\[0\].path: there is no file", capsys.readouterr().err)


def test_ctrl_c_stops_the_job(cluster: str, env: dict[str, str], tmp_path: Path) -> None:
    job = submit(cluster, env, save_sft_run(tmp_path), "trainer.total_steps=10000")
    written = tmp_path / "run" / "metrics.jsonl"
    job.wait_for(lambda: written.exists() and written.read_text().count("\n"))
    job.interrupt()
    assert job.status() == 130, job.said()
    assert "which is saved; run the same command to resume from there" in job.said(), job.said()[-3000:]
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


# ---- a driver in another folder than the cluster's nodes


def test_workers_find_what_the_driver_names_relative_to_its_own_folder(
    nodes: ClusterAddress, env: dict[str, str], tmp_path: Path
) -> None:
    """The nodes were started in the repository's root. Every key that names a file or a folder is relative
    here."""
    save_ppo_run(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "reward.py").rename(tmp_path / "own" / "reward.py")
    shutil.copy(ROOT / "examples" / "custom_maths.py", tmp_path / "own" / "losses.py")
    relative = [
        "model.path=policy",
        "data.train_files=[train.parquet]",
        "reward.functions=[{path: own/reward.py}]",
        "algorithm.policy_loss.function=own/losses.py:unclipped",
        "trainer.output_dir=run",
        "checkpoint.dir=saved",
        "checkpoint.at_end=true",
        "resharding.transport=folder",
    ]
    command = ["-m", "megarl", "train", "run.yaml", *relative, *WITHOUT_CRITIC]
    run = Command(command, tmp_path / "train.log", {**env, "RAY_ADDRESS": nodes.gcs}, cwd=tmp_path)
    assert run.status() == 0, run.said()
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert (tmp_path / "saved" / f"step_{STEPS:08d}" / "actor").is_dir()
    assert (tmp_path / "run" / "huggingface" / "model.safetensors").is_file()


# ---- torchrun


def launch_nodes(
    config: Path, *arguments: str, num_nodes: int = 2, options: Sequence[str] = ()
) -> list[Command]:
    """Start all nodes on this machine."""
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    script = ["-m", "megarl", "launch", str(config), *arguments]
    return [
        Command(
            [
                *TORCHRUN,
                *options,
                "--nnodes",
                str(num_nodes),
                "--node-rank",
                str(rank),
                "--nproc-per-node",
                "1",
                *meeting,
                *script,
            ],
            config.with_name(f"node{rank}.log"),
            environment(),
        )
        for rank in range(num_nodes)
    ]


def test_under_torchrun_a_failure_ends_all_nodes_with_its_cause(tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    nodes = launch_nodes(
        tmp_path / "run.yaml", *WITHOUT_CRITIC, f"reward.functions=[{{path: {tmp_path / 'failing.py'}}}]"
    )
    nodes[0].wait_for(lambda: "2 nodes joined" in nodes[0].said())
    everything = [process for node in nodes for process in node.processes()]
    assert len(everything) > 8
    assert [node.status() for node in nodes] == [1, 1], nodes[0].said()
    assert "compute_score raised KeyError: 'answer'" in nodes[0].said()
    assert gone_within(everything, limit_s=30) == []


def test_under_torchrun_a_configuration_that_is_wrong_starts_nothing(tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    (node,) = launch_nodes(tmp_path / "run.yaml", "actor.optm.lr=1", num_nodes=1)
    assert node.status() == 1  # torchrun's own; the node's is 2, which it prints
    assert "did you mean actor.optim" in node.said()
    assert "(exitcode: 2)" in node.said()


def test_torchrun_starts_ray_on_its_nodes_and_the_losses_are_those_of_a_run_without_it(
    ray_cluster: None, tmp_path: Path
) -> None:
    """The driver is killed once, and torchrun starts the run again."""
    config = save_sft_run(tmp_path)
    nodes = launch_nodes(config, "checkpoint.every_steps=2", options=["--max-restarts", "1"])
    nodes[0].wait_for(lambda: (tmp_path / "run" / "checkpoints" / "latest").exists())
    [driver] = [process for process in nodes[0].processes() if "train" in process.cmdline()]
    driver.kill()
    assert [node.status() for node in nodes] == [0, 0], nodes[0].said()
    assert "2 nodes joined" in nodes[0].said()
    on_one_node = [
        "placement.num_nodes=1",
        "placement.devices_per_node=2",
        f"trainer.output_dir={tmp_path / 'alone'}",
    ]
    run_sft(load_config(SFTConfig, str(config), on_one_node))
    of_torchrun, alone = (
        [[line.get(name) for name in SAME_LOSS] for line in metrics(run)]
        for run in (tmp_path / "run", tmp_path / "alone")
    )
    assert len(of_torchrun) == 4
    assert of_torchrun == alone
    weights = [
        (run / "huggingface" / "model.safetensors").read_bytes()
        for run in (tmp_path / "run", tmp_path / "alone")
    ]
    assert weights[0] == weights[1]
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()
