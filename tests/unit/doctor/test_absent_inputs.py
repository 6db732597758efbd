"""On a machine that has a run's configuration and not its files: one rule for `check`, `check --fast`, `plan` and a submission."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config.errors import ConfigError
from megarl.config.schema import PPOConfig
from megarl.doctor.checked_config import load_checked_anywhere, load_checked_here
from megarl.doctor.examined_config import load_examined_anywhere
from tests.unit.config.folders import ARCHITECTURE, ppo_values, write_yaml

COMMANDS = (["check"], ["check", "--fast"], ["plan"])


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run for a cluster: its reward function is here, and a `config.json` that somebody wrote for its model."""
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = ppo_values(tmp_path)
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps(ARCHITECTURE))
    (tmp_path / "train.parquet").unlink()
    values["trainer"]["output_dir"] = "/proc/of-a-cluster/run"
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n")
    return write_yaml(tmp_path / "run.yaml", values)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_json_is_enough_and_the_rest_is_listed(command: list[str], laptop: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, laptop, "checkpoint.resume=/shared/run/step_5", "device=cuda", "tracking.loggers=[swanlab]"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    listed = [line.removeprefix("not on this machine: ") for line in out.splitlines() if line.startswith("not on this machine: ")]
    assert [line.partition(": ")[0] for line in listed] == [
        "data.train_files",
        "model.path",
        "model.path",
        "device",
        "tracking.loggers",
        "trainer.output_dir",
        "checkpoint.resume",
    ]
    assert "has no weights" in listed[1]
    assert "has no tokenizer" in listed[2]
    assert "are free" not in out  # its checkpoints do not go to this machine's disk


@pytest.mark.parametrize("command", [["train"]])
def test_a_run_needs_all_of_it(command: list[str], laptop: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, laptop]) == 2
    assert "4 problems" in capsys.readouterr().err


def test_what_is_here_is_examined(laptop: str, tmp_path: Path) -> None:
    assert len(load_examined_anywhere(PPOConfig, laptop).absent) == 4
    (tmp_path / "reward.py").write_text("def compute_score(")
    with pytest.raises(ConfigError, match=r"1 problem\n.*reward.functions: .*reward.py"):
        load_examined_anywhere(PPOConfig, laptop)


def test_data_that_are_here_are_read_where_the_weights_are_not(laptop: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{broken\n")
    override = ["data.train_files=[train.jsonl, far/away.parquet]"]
    with pytest.raises(ConfigError, match="ground truth|train.jsonl|tokenizer"):
        load_checked_here(PPOConfig, laptop, override)
    found = load_checked_anywhere(PPOConfig, laptop, override).absent
    assert [line for line in found if line.startswith("data.train_files")] == [found[0]]
    assert "far/away.parquet" in found[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_files=[/shared/notes.txt.d/*.parquet]", "patterns are not expanded"),
        ("data.train_files=[model]", "is a folder"),
        ("reward.functions=[{path: model}]", "is a folder; name the file in it"),
        ("trainer.output_dir=/", "the root of the file system"),
        ("checkpoint.resume=''", "give auto, disable, or the path of a checkpoint"),
        ("trainer.validate_every_steps=2", "needs val_files"),
    ],
)
def test_what_is_wrong_on_every_machine_is_refused(override: str, said: str, laptop: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_checked_anywhere(PPOConfig, laptop, [override])


def test_where_all_inputs_are_here_the_run_needs_this_machine(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))
    for override in ("trainer.output_dir=/proc/x", "tracking.loggers=[swanlab]"):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            load_checked_anywhere(PPOConfig, path, [override])
        assert len(load_checked_anywhere(PPOConfig, path, [override, "device=cuda"]).absent) == 2
