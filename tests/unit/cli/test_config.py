"""`megarl config`: what is printed is the same run, as a whole and with only what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megarl.cli.main import main
from megarl.config.load import plain_values, read_config
from megarl.config.schema import RunConfig

RUNS = ("quickstart", "quickstart_sft", "quickstart_dpo", "quickstart_reward_model", "gpt_oss_120b_grpo")


@pytest.mark.parametrize("changed", [[], ["--changed"]])
@pytest.mark.parametrize("name", RUNS)
def test_what_is_printed_is_the_same_run(
    name: str, changed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"configs/{name}.yaml", "trainer.seed=7"]
    assert main(["config", *arguments, *changed]) == 0
    (file := tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    expected = read_config(RunConfig, arguments[0], arguments[1:]).required()
    assert plain_values(read_config(RunConfig, file).required()) == plain_values(expected)


def test_only_what_differs_from_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "run.yaml").write_text(
        "model: model\ndata: {train_files: [a.parquet]}\nrollout: {n: 4, temperature: 1.0}\nalgorithm: grpo\n"
    )
    assert main(["config", str(file), "trainer.total_steps=9", "--changed"]) == 0
    values = yaml.safe_load(capsys.readouterr().out)
    assert values.pop("algorithm")["advantage"]["estimator"] == "grpo"
    assert values == {
        "kind": "ppo",
        "model": {"path": str(tmp_path / "model")},
        "data": {"train_files": [str(tmp_path / "a.parquet")]},
        "rollout": {"n": 4},
        "trainer": {"total_steps": 9},
    }


def test_errors_are_those_of_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "configs/quickstart.yaml", "actor.optm.lr=1"]) == 2
    assert "actor.optm: unknown key; did you mean actor.optim?" in capsys.readouterr().err
    assert main(["config"]) == 2
    assert "give the CONFIG to print, or --schema" in capsys.readouterr().err
    assert main(["config", "--schema", "--changed"]) == 2
    assert "--changed does not apply to --schema" in capsys.readouterr().err
