"""The end of a command ends the processes that it has started, at every depth.

The tests use fresh processes, because they are about parents and children.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.main import READER_GONE
from tests.command import Command
from tests.processes import gone_within
from tests.unit.rehearse.dry_run.runs import TINY, save_config

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
COLD = [sys.executable]
# A reward function that starts a process in a session of its own and never returns.
HANGING_REWARD = """
import subprocess, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)
"""
STAGE = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
print("began", flush=True)
time.sleep(600)
"""
STAGES = """
import sys
from megarl.machine.reaper import owned_processes
from megarl.recipes.quickstart.run import run_stages
with owned_processes():
    sys.exit(run_stages([[sys.executable, file] for file in sys.argv[1:]]))
"""


def write(path: Path, values: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def end(command: Command, number: signal.Signals) -> None:
    """Send a signal to the command alone, and check its status and that nothing of it is left."""
    processes = command.processes()
    assert len(processes) > 1, "the command has started nothing"
    command.process.send_signal(number)
    assert command.status() == 128 + number, command.said()
    assert gone_within(processes, limit_s=60) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_scoring_rows_ends_reward_processes_and_what_they_started(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(HANGING_REWARD)
    (tmp_path / "rows.jsonl").write_text('{"data_source": "x", "response": "1", "ground_truth": "1"}\n')
    values = {
        "model": {"path": "absent"},
        "data": {"train_files": ["absent.jsonl"], "max_prompt_length": 8, "max_response_length": 8},
        "actor": {"micro_batch": {"max_tokens": 16}},
        "critic": {"micro_batch": {"max_tokens": 16}},
        "trainer": {"prompts_per_step": 1},
        "reward": {"functions": [{"path": "reward.py"}], "time_limit_s": 500.0},
    }
    rows = str(tmp_path / "rows.jsonl")
    arguments = ["-m", "megarl", "eval", write(tmp_path / "run.yaml", values), "--rows", rows]
    command = Command(arguments, tmp_path / "log", python=COLD)

    try:
        command.wait_for(lambda: command.processes("sleep 600"))
        end(command, number)
    finally:
        command.kill_all()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_dry_run_ends_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    values = {
        "algorithm": "grpo",
        "model": {"path": save_config(tmp_path / "model", TINY)},
        "data": {"train_files": ["absent.parquet"], "max_prompt_length": 64, "max_response_length": 64},
        "actor": {"parallel": {"pipeline_parallel_size": 2}, "micro_batch": {"max_tokens": 512}},
        "reward": {"functions": [{"path": "absent.py"}]},
        "rollout": {"n": 4},
        "trainer": {"prompts_per_step": 64},
        "device": "cuda",
    }
    run = write(tmp_path / "run.yaml", values)
    arguments = ["-m", "megarl", "check", "--dry-run", run, "--ranks", "all"]
    command = Command(arguments, tmp_path / "log", python=COLD)

    # One of the signals comes when ranks have been forked; the others while the process that forks them
    # imports torch.
    begun = (
        "rank 0: build finished"
        if number is signal.SIGKILL
        else "loading torch and Megatron-Core for 2 ranks"
    )
    try:
        command.wait_for(lambda: begun in command.said() and command.processes("multiprocessing"))
        end(command, number)
    finally:
        command.kill_all()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_recipe_passes_signals_on_to_its_stage(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(STAGE)
    (tmp_path / "second.py").write_text("print('second stage')")
    command = Command(
        ["-c", STAGES, str(tmp_path / "first.py"), str(tmp_path / "second.py")], tmp_path / "log", python=COLD
    )

    try:
        command.wait_for(lambda: "began" in command.said())
        end(command, number)
    finally:
        command.kill_all()

    assert ("saved" in command.said()) == (number is signal.SIGTERM)
    assert "second" not in command.said()


def test_a_reader_that_ends_early_is_no_failure() -> None:
    """A reader that ends early is, for example, `megarl config --schema | head`."""
    command = [sys.executable, "-m", "megarl", "config", "--schema", "ppo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == READER_GONE
