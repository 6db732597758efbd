"""Test every way in which a run started by a user can end: the message names the cause, and no process is
left after 30 seconds.

test_resume.py covers a driver that is killed in the middle of a save.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megarl.config.load import dump_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    ParallelConfig,
    PPOConfig,
    RecoveryConfig,
    SFTConfig,
)
from tests import fork_server
from tests.command import Command
from tests.failure_pages import check_documented, last_page_of
from tests.integration.tiny_run import save_inputs, tiny_config, tiny_sft_config
from tests.processes import gone_within, reached_by_strangers

LIMIT_S = 30.0
FORKED = fork_server.PYTHON
FRESH = [sys.executable]  # a forked process ends with its client; these must end by themselves
SLOW_REWARD = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str in (ground_truth, ""):  # as it is tried before the run
        return 1.0
    pathlib.Path(__file__).with_name("scoring").touch()
    time.sleep(100)
"""


class Run(Command):
    """`megarl train` in a folder."""

    def __init__(self, folder: Path, config: PPOConfig | SFTConfig, python: Sequence[str]) -> None:
        self.output_dir = folder / "run"
        dump_config(config, folder / "run.yaml")
        arguments = ["-m", "megarl", "train", str(folder / "run.yaml")]
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

    def make(config: PPOConfig | SFTConfig, python: Sequence[str] = FORKED) -> Run:
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
    run = start(sft_config(folder), python=FRESH)
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
    """The first one saves a run whose configuration saves only at its end, and the same command resumes it.
    The second one does not wait for the step, in which a rank is stopped here."""
    saved = start(sft_config(folder))
    saved.wait_for(lambda: saved.steps() >= 1)
    saved.interrupt()
    assert saved.status(LIMIT_S) == 130
    last = saved.said().splitlines()[-1]
    assert (stopped := re.fullmatch(r"stopped by Ctrl-C after step (\d+), which is saved; run .*", last))
    assert saved.steps() == int(stopped[1])

    run = start(sft_config(folder))
    run.wait_for(lambda: run.steps() >= int(stopped[1]) + 1)
    assert f"after step {stopped[1]}, loaded in" in run.said()
    everything = run.processes()
    run.processes("ray::WorkerHost")[0].send_signal(signal.SIGSTOP)
    run.interrupt()
    run.wait_for(lambda: "Ctrl-C: the run ends after this step" in run.said())
    run.interrupt()
    time.sleep(0.1)  # while it is ending
    run.interrupt()
    assert run.status(LIMIT_S) == 130
    assert gone_within(everything, LIMIT_S) == []
    assert run.said().count("megarl train: interrupted; ") == 1
    assert "; the same command " in run.said().splitlines()[-1]
    assert "Traceback" not in run.said()
    assert (run.output_dir / "timeline.json").exists()


def test_a_second_start_on_a_folder_of_a_run_is_refused_and_the_first_goes_on(
    start: Callable[..., Run], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run that was killed does not keep its folders: the same command resumes at once."""
    config = sft_config(folder)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=1, save_hf=False))
    run = start(config)
    run.wait_for(lambda: run.steps() >= 2)
    link = tmp_path_factory.mktemp("elsewhere") / "link"
    link.symlink_to(folder, target_is_directory=True)
    names = {path.name for path in run.output_dir.iterdir()}

    # The same folder by another path, and another folder with the same checkpoints.
    for number, (key, changes) in enumerate(
        [
            ("trainer.output_dir", []),
            ("trainer.output_dir", [f"trainer.output_dir={link}/run"]),
            (
                "checkpoint.dir",
                [f"trainer.output_dir={folder}/new/other", f"checkpoint.dir={link}/run/checkpoints"],
            ),
        ]
    ):
        log = folder / f"second_{number}.txt"
        second = Command(["-m", "megarl", "train", str(folder / "run.yaml"), *changes], log)
        assert second.status() == 2, second.said()
        (line,) = (line for line in second.said().splitlines() if "megarl train: " in line)
        named = re.search(
            rf"megarl train: {key}='\S+' is used by a run that has not ended \(process (\d+) on \S+, since "
            rf"[-\d]+ [:\d]+\); wait for its end, end it, or give another {key}$",
            line,
        )
        assert named is not None, line
        assert int(named[1]) in {process.pid for process in run.processes()}
    assert not (folder / "new").exists()
    assert names <= {path.name for path in run.output_dir.iterdir()}
    num_steps = run.steps()
    run.wait_for(lambda: run.steps() >= num_steps + 3)
    assert "Traceback" not in run.said()

    run.kill_all()
    num_steps = run.steps()
    resumed = start(config)
    resumed.wait_for(lambda: "resumed from" in resumed.said())
    resumed.wait_for(lambda: resumed.steps() > num_steps)
    resumed.interrupt()
    assert resumed.status(LIMIT_S) == 130
    assert not (run.output_dir / ".lock").exists()


def program_of(process: psutil.Process) -> str:
    """Return the program of a process, or of the forked one for which it stands."""
    first, *others = process.cmdline()
    if others[: len(FORKED) - 1] != FORKED[1:]:
        return first
    return next(each for each in others[len(FORKED) - 1 :] if not each.startswith("-"))


# After the loss of an agent, the raylet ends the node itself.
@pytest.mark.parametrize(
    ("killed", "recovers", "python", "named"),
    [
        ("runtime_env/agent/main.py", True, FORKED, "one Ray agent failed, agent_name = runtime_env_agent"),
        ("tail", False, FORKED, "one Ray agent failed, agent_name = dashboard_agent"),
        ("raylet", True, FRESH, "Ray's raylet has ended"),
        ("gcs_server", True, FRESH, "Ray's (gcs_server|raylet) has ended"),
    ],
    ids=["runtime_env_agent", "dashboard_agent", "raylet", "gcs_server"],
)
def test_the_loss_of_a_process_of_rays_own_ends_the_run_and_is_named(
    killed: str,
    recovers: bool,
    python: Sequence[str],
    named: str,
    start: Callable[..., Run],
    folder: Path,
) -> None:
    """No other node can join this Ray, so a run with recovery does not wait for one."""
    config = sft_config(folder)
    config = replace(
        config,
        actor=replace(config.actor, parallel=ParallelConfig()),
        recovery=RecoveryConfig(enabled=recovers),
    )
    run = start(config, python=python)
    run.wait_for(lambda: run.steps() >= 1)
    everything = run.processes()
    (raylet,) = (each for each in everything if each.cmdline()[0].endswith("raylet/raylet"))
    (victim,) = (
        each
        for each in {*everything, *raylet.children(recursive=True)}
        if re.search(rf"(^|/){killed}$", program_of(each))
    )
    victim.kill()
    assert run.status(60) == 1
    assert gone_within(everything, LIMIT_S) == []
    page = last_page_of(run.said())
    assert "what    RayEndedError: Ray's " in page
    assert re.search(named, page), page
    assert "waiting up to" not in run.said()


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
