"""examples/tutorial without its model: the questions, the reward, and both configurations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.tutorial import data, reward, run
from megarl.cli.main import main

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "tutorial"


def test_no_test_question_is_in_training() -> None:
    train, test = data.make_rows()
    assert (train, test) == data.make_rows()
    assert len(train) + len(test) == data.LARGEST**2
    pairs = [{frozenset(re.findall(r"\d+", row["prompt"])) for row in rows} for rows in (train, test)]
    assert pairs[0].isdisjoint(pairs[1])
    for row in test:
        assert str(sum(map(int, re.findall(r"\d+", row["prompt"])))) == row["ground_truth"]


def test_the_reward_tests_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    reward.self_test()
    monkeypatch.setattr(reward, "compute_score", lambda *arguments: {"score": 1.0})
    with pytest.raises(SystemExit, match="scores 1"):
        reward.self_test()


def test_right_answers_have_full_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data.make_rows()[1]))
    assert (
        main(["eval", str(FOLDER / "smollm2.yaml"), "--rows", str(tmp_path / "test.jsonl"), "--ground-truth"])
        == 0
    )
    assert "44 rows scored: mean 1," in capsys.readouterr().out


def test_the_configuration_is_good_but_for_the_model_that_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    """The stages before the run create the files that it names."""
    assert main(["check", str(FOLDER / "smollm2.yaml"), "model.path=models/Qwen2.5-0.5B-Instruct"]) == 0
    assert "OK, except for files that are not on this machine" in " ".join(capsys.readouterr().out.split())


def test_the_configuration_for_a_gpu_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(FOLDER / "qwen2.5_0.5b_gpu.yaml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "; using " in said
    assert "OK, except for files that are not on this machine" in said


def test_each_stage_is_a_command_that_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Results that are there are not made again."""
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    first = run.stages(["trainer.seed=1"], tmp_path / "seed1")
    commands = [stage[2] for stage in first if stage[1] == "megarl"]
    assert commands == ["eval", "train", "eval", "generate", "report"]
    for _, module, *_ in first:
        assert module == "megarl" or (ROOT / Path(*module.split("."))).with_suffix(".py").exists()
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "results.json").touch()
    assert run.stages(["trainer.seed=1"], tmp_path / "seed1") == [
        stage for stage in first if stage != first[3]
    ]
