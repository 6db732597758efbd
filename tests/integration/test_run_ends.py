"""`megarl train` as a user runs it, ended in every way: the message names the cause, and no process is left after 30 seconds."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megarl.config.load import dump_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    DataConfig,
    Device,
    DType,
    ModelConfig,
    PPOConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    TrainerConfig,
)
from tests.failure_pages import check_documented, last_page_of
from tests.integration.tiny_run import save_inputs
from tests.processes import gone_within

LIMIT_S = 30.0
START_LIMIT_S = 150.0  # until the first step, on a busy machine
SLOW_REWARD = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    pathlib.Path(__file__).with_name("scoring").touch()
    time.sleep(100)
"""


class Run:
    """A running `megarl train`, and what it writes."""

    def __init__(self, folder: Path) -> None:
        self.output_dir = folder / "run"
        self.log = folder / "log.txt"
        command = [sys.executable, "-m", "megarl", "train", str(folder / "run.yaml")]
        with self.log.open("w") as log:
            self.driver = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            assert self.driver.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.2)

    def descendants(self, named: str = "") -> list[psutil.Process]:
        found = []
        for process in self.driver.children(recursive=True):
            try:
                if named in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def steps(self) -> int:
        metrics = self.output_dir / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_inputs(tmp_path)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[], Run]]:
    runs: list[Run] = []

    def make() -> Run:
        config = PPOConfig(
            model=ModelConfig(path=str(folder / "policy"), dtype=DType.float32),
            data=DataConfig(train_files=[str(folder / "train.parquet")], max_prompt_length=8, max_response_length=8),
            reward=RewardConfig(functions=[RewardFunctionConfig(path=str(folder / "reward.py"))], time_limit_s=200, num_processes=1),
            algorithm=AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.rloo)),  # no critic: a process less to start
            rollout=RolloutConfig(n=2, restart_limit=0),  # so that the death of any process ends the run
            trainer=TrainerConfig(total_steps=10_000, prompts_per_step=8, validate_before=False, output_dir=str(folder / "run")),
            device=Device.cpu,
        )
        dump_config(config, folder / "run.yaml")
        runs.append(Run(folder))
        return runs[-1]

    yield make
    for run in runs:
        for process in [*run.descendants(), run.driver] if run.driver.is_running() else []:
            process.kill()


def test_a_killed_worker_ends_the_run_and_is_named(start: Callable[[], Run]) -> None:
    run = start()
    run.wait_for(lambda: run.steps() >= 1)
    victim = run.descendants("ray::WorkerHost")[0]
    everything = run.descendants()
    victim.kill()
    assert run.driver.wait(timeout=LIMIT_S) == 1
    assert gone_within(everything, LIMIT_S) == []
    said = run.log.read_text()
    assert f"pid {victim.pid}" in said
    assert "rank 0 (node 127.0.0.1" in said
    page = last_page_of(said)
    assert f"node 127.0.0.1, pid {victim.pid}, in " in page
    assert f"-{victim.pid}.err: that process and the engine in it" in page


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing(start: Callable[[], Run]) -> None:
    run = start()
    run.wait_for(lambda: run.steps() >= 1)
    everything = run.descendants()
    assert len(everything) > 4
    run.driver.kill()
    run.driver.wait(timeout=LIMIT_S)
    assert gone_within(everything, LIMIT_S) == []


@pytest.mark.slow
def test_ctrl_c_ends_cleanly(start: Callable[[], Run]) -> None:
    run = start()
    run.wait_for(lambda: run.steps() >= 1)
    everything = run.descendants()
    run.driver.send_signal(signal.SIGINT)
    assert run.driver.wait(timeout=LIMIT_S) == 130
    assert gone_within(everything, LIMIT_S) == []
    said = run.log.read_text()
    assert "megarl train: interrupted" in said
    assert "Traceback" not in said
    assert (run.output_dir / "timeline.json").exists()


@pytest.mark.slow
def test_a_killed_reward_function_is_an_error_of_its_sample_and_ends_the_run(start: Callable[[], Run], folder: Path) -> None:
    (folder / "reward.py").write_text(SLOW_REWARD)
    run = start()
    run.wait_for((folder / "scoring").exists)
    everything = run.descendants()
    for process in run.descendants("multiprocessing.spawn import spawn_main"):
        process.kill()
    assert run.driver.wait(timeout=LIMIT_S) == 1
    assert gone_within(everything, LIMIT_S) == []
    assert "its process died while scoring it" in run.log.read_text()
    check_documented("reward-process-killed", last_page_of(run.log.read_text()))
