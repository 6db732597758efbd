"""`megarl recipes`: the list, a file, and a copy that is the same run."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config.load import plain_values, read_config
from megarl.config.schema import RunConfig
from megarl.config.shipped import CONFIGS_DIR


def test_the_list_has_every_file_with_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = {row[0] for row in rows if row}
    assert {file.stem for file in CONFIGS_DIR.glob("*.yaml")} <= names
    assert {file.stem for file in (CONFIGS_DIR / "algorithm").glob("*.yaml")} <= names
    assert ["qwen3_32b_grpo", "ppo", "models/Qwen3-32B", "4", "32"] in rows
    assert ["quickstart_sft", "sft"] in [row[:2] for row in rows]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("quickstart", "quickstart"),
        ("configs/quickstart.yaml", "quickstart"),
        ("algorithm/grpo", "algorithm/grpo"),
        ("grpo", "algorithm/grpo"),
        ("configs/base/cluster.yaml", "base/cluster"),
    ],
)
def test_a_file_is_printed_as_it_is(name: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", name]) == 0
    assert capsys.readouterr().out == (CONFIGS_DIR / f"{file}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(file.stem for file in CONFIGS_DIR.glob("*.yaml")))
def test_a_copy_is_the_same_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a file with a base, whose path is relative to the file."""
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "copy", name]) == 0
    assert main(["recipes", "copy", name, "mine.yaml"]) == 0
    original = plain_values(read_config(RunConfig, f"configs/{name}.yaml").required())
    assert plain_values(read_config(RunConfig, f"{name}.yaml").required()) == original
    assert plain_values(read_config(RunConfig, "mine.yaml").required()) == original


def test_a_copy_of_a_preset_is_the_same_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "algorithm").mkdir()
    assert main(["recipes", "copy", "algorithm/async_grpo", "algorithm/mine.yaml"]) == 0
    run = "configs/qwen2.5_7b_grpo.yaml"
    (tmp_path / "run.yaml").write_text(f"base: {run}\nalgorithm: mine\n")
    copied = plain_values(read_config(RunConfig, "run.yaml").required())
    assert copied == plain_values(read_config(RunConfig, run, ["algorithm=async_grpo"]).required())


def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.yaml").write_text("mine")

    def refused(*arguments: str) -> str:
        assert main(["recipes", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    assert "quickstart.yaml: there is such a file already; give another name" in refused("copy", "quickstart")
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"
    assert "did you mean qwen3_32b_grpo" in refused("show", "qwen3_32_grpo")
    assert "give the name of a configuration to copy" in refused("copy")
    assert "no/mine.yaml: cannot be written (No such file" in refused("copy", "quickstart", "no/mine.yaml")
