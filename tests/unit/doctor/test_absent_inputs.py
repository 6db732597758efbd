"""The commands that plan a run on a machine which has its configuration and not its files follow one rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config.load import dump_config
from megarl.config.schema import PPOConfig
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import ConfigError
from tests.integration.tiny_run import save_inputs, tiny_config
from tests.unit.config.folders import ARCHITECTURE, ppo_values, write_yaml

COMMANDS = (["check"], ["check", "--fast"], ["check", "--plan"])


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a run for a cluster, with its reward function and a hand-written `config.json` for its model."""
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = ppo_values(tmp_path)
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    (tmp_path / "model" / "config.json").write_text(json.dumps(ARCHITECTURE))
    (tmp_path / "train.parquet").unlink()
    values["trainer"]["output_dir"] = "/proc/of-a-cluster/run"
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )

    return write_yaml(tmp_path / "run.yaml", values)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_json_is_enough_and_the_rest_is_listed(
    command: list[str], laptop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                *command,
                laptop,
                "checkpoint.resume=/shared/run/step_5",
                "device=cuda",
                "tracking.loggers=[swanlab]",
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert err == ""
    listed = [
        line.removeprefix("not on this machine: ")
        for line in out.splitlines()
        if line.startswith("not on this machine: ")
    ]
    assert [line.partition(": ")[0] for line in listed] == [
        "data.train_files",
        "model.path",
        "model.path",
        "device",
        "tracking.loggers",
        "checkpoint.resume",
    ]
    assert "has no weights" in listed[1]
    assert "has no tokenizer" in listed[2]
    assert "are free" not in out  # its checkpoints do not go to this machine's disk


def test_a_run_needs_all_of_it(laptop: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", laptop]) == 2
    err = capsys.readouterr().err
    assert "4 problems" in err

    for said in (
        "data.train_files: there is no file",
        "has no weights",
        "has no tokenizer",
        "trainer.output_dir: ",
    ):
        assert said in err


def test_code_that_is_here_is_examined(laptop: str, tmp_path: Path) -> None:
    assert len(load_for_plan(PPOConfig, laptop, reads_inputs=True).absent) == 3
    (tmp_path / "reward.py").write_text("def compute_score(")
    with pytest.raises(ConfigError, match=r"1 problem\n.*reward.functions: .*reward.py"):
        load_for_plan(PPOConfig, laptop, reads_inputs=True)


def test_data_that_are_here_are_read_where_the_weights_are_not(tmp_path: Path) -> None:
    save_inputs(tmp_path)
    (tmp_path / "policy" / "model.safetensors").unlink()
    dump_config(tiny_config(tmp_path, tmp_path / "run"), path := tmp_path / "run.yaml")
    (line,) = load_for_plan(PPOConfig, str(path), reads_inputs=True).absent
    assert "has no weights" in line
    (tmp_path / "rows.jsonl").write_text("{broken\n")
    override = f"data.train_files=[{tmp_path}/rows.jsonl, far/away.parquet]"
    with pytest.raises(ConfigError, match=r"1 problem\n.*data.train_files: .*rows.jsonl"):
        load_for_plan(PPOConfig, str(path), [override], reads_inputs=True)
    assert len(load_for_plan(PPOConfig, str(path), [override]).absent) == 2


def test_a_data_set_on_a_hub_does_not_hide_a_file_that_is_missing(laptop: str) -> None:
    found = load_for_plan(PPOConfig, laptop, ["data.train_files=[maker/rows, far/away.parquet]"]).absent
    assert [line for line in found if line.startswith("data.train_files: ")] == [
        "data.train_files: maker/rows is on the hub; `megarl train` downloads it",
        *(line for line in found if "there is no file 'far/away.parquet'" in line),
    ]
    assert any("far/away.parquet" in line for line in found)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_files=[/shared/notes.txt.d/*.parquet]", "patterns are not expanded"),
        ("data.train_files=[model]", "is a folder"),
        ("reward.functions=[{path: model}]", "is a folder; give the file in it"),
        ("trainer.output_dir=/", "the root of the file system"),
        ("checkpoint.resume=''", "give auto, disable, or the path or URL of a checkpoint"),
        ("trainer.validate_every_steps=2", r"has no effect with data.val_files=\[\]"),
    ],
)
def test_what_is_wrong_on_every_machine_is_refused(override: str, said: str, laptop: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_for_plan(PPOConfig, laptop, [override])


def test_where_all_inputs_are_here_the_run_needs_this_machine(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))
    for override in ("trainer.output_dir=/proc/x", "tracking.loggers=[swanlab]"):
        with pytest.raises(ConfigError, match=override.partition("=")[0]):
            load_for_plan(PPOConfig, path, [override])
        elsewhere = load_for_plan(PPOConfig, path, [override, "device=cuda"]).absent
        assert [line.partition(":")[0] for line in elsewhere] == [
            "device",
            *(["tracking.loggers"] if "loggers" in override else []),
        ]
        assert load_for_plan(PPOConfig, path, [override], starts_elsewhere=True).absent == elsewhere[1:]
