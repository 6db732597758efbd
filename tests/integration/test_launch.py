"""The launchers, as a user runs them: Ray job submission to two nodes, and torchrun with two nodes."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema import SFTConfig
from tests.integration.launched_run import STEPS, Command, environment, free_port, save_ppo_run, save_sft_run, two_node_cluster
from tests.integration.tiny_run import run_sft
from tests.processes import gone_within

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WITHOUT_CRITIC = ("algorithm.advantage.estimator=rloo", "rollout.n=2")  # a process less to start
SAME_LOSS = ("sft/loss", "sft/grad_norm", "sft/lr", "val/loss", "num_tokens")


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- Ray job submission


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))


@pytest.fixture(scope="module")
def cluster(env: dict[str, str]) -> Iterator[str]:
    with two_node_cluster(env) as address:
        yield address


def submit(address: str, env: dict[str, str], folder: Path, *arguments: str) -> Command:
    script = [sys.executable, "launch/ray_submit.py", "--address", address, str(folder / "run.yaml")]
    return Command([*script, *arguments], folder / "submit.log", env)


def test_a_submitted_run_trains_and_its_status_is_the_commands(cluster: str, env: dict[str, str], tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    job = submit(cluster, env, tmp_path)
    assert job.status() == 0, job.said()
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert "PPO run" in job.said()  # the last table of the log


@pytest.mark.slow
def test_a_submitted_run_that_fails_shows_its_first_cause(cluster: str, env: dict[str, str], tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    job = submit(cluster, env, tmp_path, *WITHOUT_CRITIC, f"reward.functions=[{{path: {tmp_path / 'failing.py'}}}]")
    assert job.status() == 1, job.said()
    assert "compute_score raised KeyError: 'answer'" in job.said()


def test_what_is_wrong_is_said_before_anything_is_sent(env: dict[str, str], tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    nobody = f"http://127.0.0.1:{free_port()}"
    wrong = submit(nobody, env, tmp_path, "actor.optm.lr=1")
    assert wrong.status() == 2
    assert "did you mean actor.optim" in wrong.said()
    good = submit(nobody, env, tmp_path)
    assert good.status() == 2
    assert f"no job server answers at {nobody}" in good.said()


@pytest.mark.slow
def test_ctrl_c_stops_the_job(cluster: str, env: dict[str, str], tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    job = submit(cluster, env, tmp_path, *WITHOUT_CRITIC, "trainer.total_steps=10000")
    written = tmp_path / "run" / "metrics.jsonl"
    job.wait_for(lambda: written.exists() and written.read_text().count("\n"))
    job.interrupt()
    assert job.status() == 130, job.said()
    assert "which is saved; the same command goes on from there" in job.said(), job.said()[-3000:]
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


# ---- torchrun


def launch_nodes(config: Path, *arguments: str, num_nodes: int = 2, per_node: int = 1) -> list[Command]:
    """All on this machine."""
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    script = ["--no-python", "launch/torchrun.sh", *(["--sft"] if config.name == "sft.yaml" else []), str(config), *arguments]
    return [
        Command(
            [*TORCHRUN, "--nnodes", str(num_nodes), "--node-rank", str(rank), "--nproc-per-node", str(per_node), *meeting, *script],
            config.with_name(f"node{rank}.log"),
            environment(),
        )
        for rank in range(num_nodes)
    ]


@pytest.mark.slow
def test_torchrun_starts_ray_on_its_nodes_and_all_end_together(tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    nodes = launch_nodes(tmp_path / "run.yaml")
    assert [node.status() for node in nodes] == [0, 0], nodes[0].said()
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert "2 nodes are up" in nodes[0].said()


@pytest.mark.slow
def test_under_torchrun_a_failure_ends_all_nodes_with_its_cause(tmp_path: Path) -> None:
    save_ppo_run(tmp_path)
    nodes = launch_nodes(tmp_path / "run.yaml", *WITHOUT_CRITIC, f"reward.functions=[{{path: {tmp_path / 'failing.py'}}}]")
    nodes[0].wait_for(lambda: "2 nodes are up" in nodes[0].said())
    everything = [process for node in nodes for process in node.process.children(recursive=True)]
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


def test_sft_under_torchrun_has_the_losses_of_a_run_without_it(ray_cluster: None, tmp_path: Path) -> None:
    config = save_sft_run(tmp_path)
    (node,) = launch_nodes(tmp_path / "sft.yaml", "checkpoint.every_steps=2", num_nodes=1)
    assert node.status() == 0, node.said()
    run_sft(load_config(SFTConfig, str(config), [f"trainer.output_dir={tmp_path / 'alone'}"]))
    of_torchrun, alone = (
        [[line.get(name) for name in SAME_LOSS] for line in metrics(run)] for run in (tmp_path / "run", tmp_path / "alone")
    )
    assert len(of_torchrun) == 4
    assert of_torchrun == alone
    weights = [(run / "huggingface" / "model.safetensors").read_bytes() for run in (tmp_path / "run", tmp_path / "alone")]
    assert weights[0] == weights[1]
    assert (tmp_path / "run" / "checkpoints" / "step_00000004").is_dir()


def test_several_processes_of_torchrun_are_told_what_to_run(tmp_path: Path) -> None:
    """What megarl itself says is in tests/unit/cli/test_processes.py."""
    (node,) = launch_nodes(tmp_path / "run.yaml", num_nodes=1, per_node=2)
    assert node.status() == 1
    assert "megarl starts its own processes: use --nproc-per-node 1, not 2" in node.said()
