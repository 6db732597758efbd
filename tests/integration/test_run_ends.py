"""Test every way in which a run started by a user can end: the message names the cause, and no process is
left after 30 seconds.

test_resume.py covers a driver that is killed in the middle of a save.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megarl.config.load import dump_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    ParallelConfig,
    PPOConfig,
    SFTConfig,
)
from tests import fork_server
from tests.command import Command
from tests.failure_pages import check_documented, last_page_of
from tests.integration.tiny_run import save_inputs, tiny_config, tiny_sft_config
from tests.processes import gone_within, reached_by_strangers

LIMIT_S = 30.0
SLOW_REWARD = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str in (ground_truth, ""):  # as it is tried before the run
        return 1.0
    pathlib.Path(__file__).with_name("scoring").touch()
    time.sleep(100)
"""


class Run(Command):
    """`megarl train` or `megarl sft` in a folder."""

    def __init__(self, folder: Path, config: PPOConfig | SFTConfig, python: Sequence[str]) -> None:
        self.output_dir = folder / "run"
        dump_config(config, folder / "run.yaml")
        arguments = [
            "-m",
            "megarl",
            "sft" if isinstance(config, SFTConfig) else "train",
            str(folder / "run.yaml"),
        ]
        super().__init__(arguments, folder / "log.txt", python=python)

    def steps(self) -> int:
        metrics = self.output_dir / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_inputs(tmp_path)
    return tmp_path


@pytest.fixture
def start(folder: Path, forked_processes: None) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(config: PPOConfig | SFTConfig, python: Sequence[str] = fork_server.PYTHON) -> Run:
        runs.append(Run(folder, config, python))
        return runs[-1]

    yield make
    for run in runs:
        run.kill_all()


def sft_config(folder: Path) -> SFTConfig:
    """Configure two ranks and an unbounded run."""
    return tiny_sft_config(
        folder,
        folder / "run",
        data={"val_files": []},
        actor={"parallel": ParallelConfig(data_parallel_size=2)},
        trainer={"total_steps": 1_000_000, "samples_per_step": 8},
    )


def test_a_killed_worker_ends_the_run_and_is_named(start: Callable[..., Run], folder: Path) -> None:
    # Fresh: a forked process ends with its client, and here all must end by themselves.
    run = start(sft_config(folder), python=[sys.executable])
    run.wait_for(lambda: run.steps() >= 1)
    victim, other = run.processes("ray::WorkerHost")
    everything = run.processes()
    assert reached_by_strangers(everything) == []  # Ray's daemons, torch's store, gloo's sockets
    victim.kill()
    assert run.status(LIMIT_S) == 1
    assert gone_within(everything, LIMIT_S) == []
    said = run.said()
    assert re.search(rf"actor rank [01] \(node 127.0.0.1, pid {victim.pid}\)", said)
    page = last_page_of(said)
    assert f"node 127.0.0.1, pid {victim.pid}, in " in page
    assert f"-{victim.pid}.err: log of this process and its engine" in page
    assert f"-{other.pid}.err" not in page


def test_ctrl_c_ends_cleanly_also_when_it_is_pressed_again(start: Callable[..., Run], folder: Path) -> None:
    run = start(sft_config(folder))
    run.wait_for(lambda: run.steps() >= 1)
    everything = run.processes()
    run.interrupt()
    time.sleep(0.1)  # while it is ending
    run.interrupt()
    assert run.status(LIMIT_S) == 130
    assert gone_within(everything, LIMIT_S) == []
    assert run.said().count("megarl sft: interrupted; ") == 1
    assert "; the same command " in run.said().splitlines()[-1]
    assert "Traceback" not in run.said()
    assert (run.output_dir / "timeline.json").exists()


def ppo_config(folder: Path) -> PPOConfig:
    return tiny_config(
        folder,
        folder / "run",
        data={"val_files": []},
        reward={"time_limit_s": 200},
        # no critic: one process less to start
        algorithm=AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.rloo)),
        rollout={"n": 2},
        trainer={"total_steps": 2, "prompts_per_step": 8, "validate_before": False},
    )


def test_a_killed_reward_function_is_an_error_of_its_sample_and_ends_the_run(
    start: Callable[..., Run], folder: Path
) -> None:
    (folder / "reward.py").write_text(SLOW_REWARD)
    run = start(ppo_config(folder))
    run.wait_for((folder / "scoring").exists)
    everything = run.processes()
    assert reached_by_strangers(everything) == []  # including the weight-sync groups
    for process in run.processes("multiprocessing.spawn import spawn_main"):
        process.kill()
    assert run.status(LIMIT_S) == 1
    assert gone_within(everything, LIMIT_S) == []
    assert "its process died while scoring it" in run.said()
    check_documented("reward-process-killed", last_page_of(run.said()))
