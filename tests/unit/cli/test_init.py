"""`megarl init`: what it writes is good as it is, and nothing is written over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.load import load_config
from megarl.config.schema import AdvantageEstimator, PPOConfig
from tests.integration.tiny_run import save_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_policy(folder := tmp_path_factory.mktemp("init") / "policy")
    return folder


@pytest.fixture(autouse=True)
def _nobody_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)


@pytest.mark.parametrize("wishes", [["--algorithm", "grpo"], ["--algorithm", "ppo", "--devices", "2"], ["--kind", "sft"]], ids=" ".join)
def test_what_it_writes_passes_check_from_any_folder(
    wishes: list[str], policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(policy.parent)
    mine = tmp_path / "mine"
    assert main(["init", str(mine), "--model", "policy", "--device", "cpu", *wishes]) == 0
    said = capsys.readouterr().out
    assert f"megarl check {mine / 'run.yaml'}" in said
    monkeypatch.chdir(mine)
    assert main(["check", "run.yaml"]) == 0, capsys.readouterr().err
    if "sft" not in wishes:
        tested = subprocess.run([sys.executable, "-I", str(mine / "reward.py")], capture_output=True, text=True, check=False)
        assert (tested.returncode, tested.stderr) == (0, "")
        config = load_config(PPOConfig, "run.yaml")
        assert config.algorithm.advantage.estimator is (AdvantageEstimator.gae if "ppo" in wishes else AdvantageEstimator.grpo)
        assert config.rollout.num_replicas == config.actor.parallel.data_parallel_size == (2 if "--devices" in wishes else 1)
    before = {file: file.read_bytes() for file in mine.iterdir() if file.is_file()}
    capsys.readouterr()
    assert main(["init", ".", "--model", str(policy), *wishes]) == 2
    assert "run.yaml" in (refused := capsys.readouterr().err)
    assert "nothing is written over" in refused
    assert {file: file.read_bytes() for file in mine.iterdir() if file.is_file()} == before


def test_data_of_ones_own_are_named_with_their_columns(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"id": n, "problem": f"{n}+1=", "solution": str(n + 1)}) + "\n" for n in range(9)))
    given = ["--model", str(policy), "--data", str(data), "--device", "cpu"]
    assert main(["init", str(tmp_path / "mine"), *given]) == 0
    assert sorted(file.name for file in (tmp_path / "mine").iterdir()) == ["reward.py", "run.yaml"]
    config = load_config(PPOConfig, str(tmp_path / "mine" / "run.yaml"))
    assert (config.data.columns.prompt, config.data.columns.ground_truth, config.trainer.prompts_per_step) == ("problem", "solution", 9)
    assert main(["check", str(tmp_path / "mine" / "run.yaml")]) == 0, capsys.readouterr().err
    data.write_text('{"id": 1, "text": "a"}\n')
    assert main(["init", str(tmp_path / "other"), *given]) == 2
    assert f"{data} has the columns id, text: a question is looked for in question, prompt, " in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_terminal_is_asked_and_others_are_told(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 2
    assert "--model is missing" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "mine"), "--model", str(policy), "--algorithm", "pppo"]) == 2
    assert "algorithm=pppo: there is no such file; there are async_dapo, " in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter(["", str(policy), "", "reinforcement", "", "rloo", "cpu", ""])  # a model there must be; and what to do is a choice
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    assert main(["init", str(tmp_path / "mine")]) == 0
    config = load_config(PPOConfig, str(tmp_path / "mine" / "run.yaml"))
    assert (config.algorithm.advantage.estimator, config.device.value) == (AdvantageEstimator.rloo, "cpu")
    assert list(answers) == []
