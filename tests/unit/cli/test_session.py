"""Ownership of the output folder.

A run creates a new one, resumes in its own, and refuses those of other runs.
"""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.cli.run.context import run_elsewhere
from megarl.cli.run.resumption import is_complete
from megarl.cli.run.session import claim_output_dir, of_another_run, write_summary
from megarl.config.load import dump_config, load_config
from megarl.config.schema import (
    ActorConfig,
    CheckpointConfig,
    EarlyStopConfig,
    MetricMode,
    ModelConfig,
    PPOConfig,
    Recompute,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
)
from megarl.trainers.resume import Resume
from tests.unit.config.folders import ppo_values, write_yaml


@pytest.fixture
def config(tmp_path: Path) -> SFTConfig:
    return SFTConfig(
        model=ModelConfig(path="model"),
        data=SFTDataConfig(train_files=["train.parquet"]),
        checkpoint=CheckpointConfig(every_steps=5),
        trainer=SFTTrainerConfig(output_dir=str(tmp_path / "run")),
    )


def left_by(config: SFTConfig) -> Path:
    """Create the files that a run leaves if it is killed early."""
    output_dir = Path(config.trainer.output_dir)
    output_dir.mkdir(exist_ok=True)
    dump_config(config, output_dir / "config.yaml")
    (output_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    (output_dir / "generations.jsonl").touch()

    return output_dir


def claim(config: SFTConfig, resume: Resume | None = None) -> str:
    written = io.StringIO()
    claim_output_dir(Path(config.trainer.output_dir), config, resume, Console(file=written, width=200))
    return written.getvalue()


def resumed(is_own: bool, **state: Any) -> Resume:
    return Resume(checkpoint=Path("step_00000005"), step=5, state=state, differences=[], is_own=is_own)


def test_a_new_folder_is_made(config: SFTConfig) -> None:
    where = Path(config.trainer.output_dir).absolute()
    assert claim(config) == f"new run in {where}\n"
    assert where.is_dir()
    assert claim(config, resumed(is_own=False)) == f"new run in {where}, from step_00000005\n"


def test_a_new_run_names_the_one_that_the_user_may_have_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its output folder was relative to the folder in which it was started."""
    config = SFTConfig(model=ModelConfig(path="model"), trainer=SFTTrainerConfig(output_dir="project/run"))
    (tmp_path / "project" / "run").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project" / "run.yaml").write_text("kind: sft\n")

    monkeypatch.chdir(tmp_path / "elsewhere")
    source = "../project/run.yaml"
    assert run_elsewhere(source, config) is None  # there is no run yet
    (tmp_path / "project" / "run" / "config.yaml").touch()
    assert run_elsewhere(source, config) == (
        f"trainer.output_dir='project/run' is relative to the current folder, {tmp_path}/elsewhere, which has "
        f"no such run, but {tmp_path} has one: to resume it, run the command there, or add "
        f"trainer.output_dir={tmp_path}/project/run"
    )
    monkeypatch.chdir(tmp_path / "project")
    assert "run the command there" in (run_elsewhere("run.yaml", config) or "")
    monkeypatch.chdir(tmp_path)
    assert run_elsewhere("project/run.yaml", config) is None
    absolute = replace(config, trainer=SFTTrainerConfig(output_dir=str(tmp_path / "other")))
    assert run_elsewhere("project/run.yaml", absolute) is None
    assert run_elsewhere("configs/quickstart.yaml", config) is None  # ships with megarl


def test_a_run_that_died_before_its_first_checkpoint_starts_over(config: SFTConfig) -> None:
    disabled = replace(config, checkpoint=CheckpointConfig(resume="disable"))
    for changed in (config, disabled, replace(config, actor=ActorConfig(recompute=Recompute.full))):
        output_dir = left_by(config)
        assert "before its first checkpoint, after 1 logged step; starting over" in claim(changed)
        assert sorted(path.name for path in output_dir.iterdir()) == ["config.yaml"]


def test_a_run_that_died_before_its_first_step_gives_way_to_any(config: SFTConfig) -> None:
    output_dir = left_by(config)
    (output_dir / "metrics.jsonl").write_text("")
    assert "starting over" in claim(replace(config, model=ModelConfig(path="other")))


def test_weights_that_were_on_their_way_through_the_disk_are_removed(config: SFTConfig) -> None:
    output_dir = left_by(config)
    (output_dir / ".weights-3-abc" / "model").mkdir(parents=True)
    claim(config, resumed(is_own=True))
    assert not (output_dir / ".weights-3-abc").exists()


def test_a_run_that_goes_on_keeps_its_metrics(config: SFTConfig) -> None:
    output_dir = left_by(config)
    assert claim(config, resumed(is_own=True)) == f"resuming the run in {output_dir} after step 5\n"
    assert (output_dir / "metrics.jsonl").exists()


def test_folders_of_other_runs_are_refused_and_left_alone(config: SFTConfig) -> None:
    files = (
        f"data.train_files was {[str(Path.cwd() / 'train.parquet')]}, is {[str(Path.cwd() / 'more.parquet')]}"
    )
    others = {
        "data.seed was 0, is 3": replace(config, data=SFTDataConfig(train_files=["train.parquet"], seed=3)),
        f"model.path was '{Path.cwd() / 'model'}', is '{Path.cwd() / 'other'}'": replace(
            config, model=ModelConfig(path="other")
        ),
        files: replace(config, data=SFTDataConfig(train_files=["more.parquet"])),
        "checkpoint.resume was 'auto', is 'step_00000003'": replace(
            config, checkpoint=CheckpointConfig(resume="step_00000003")
        ),
    }
    output_dir = left_by(config)

    for why, other in others.items():
        with pytest.raises(ValueError, match="contains the metrics of another run") as caught:
            claim(other, resumed(is_own=False) if "resume" in why else None)
        assert f"({why}" in str(caught.value)
        assert (output_dir / "metrics.jsonl").exists(), why

    for content in ("", "- 1", "a: [", "a: " + "[" * 2_000, "a: &a {b: *a}", "a: !!bool x"):
        (output_dir / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match=r"another run \(config.yaml: "):
            claim(config)


def test_another_algorithm_is_another_run(tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    values["trainer"]["output_dir"] = str(tmp_path / "run")
    config = load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", values))
    (tmp_path / "run").mkdir()
    dump_config(config, tmp_path / "run" / "config.yaml")
    other = replace(config, algorithm=replace(config.algorithm, entropy_coefficient=0.5))
    assert of_another_run(tmp_path / "run", other) == "algorithm.entropy_coefficient was 0.0, is 0.5"
    assert of_another_run(tmp_path / "run", config) == ""


def test_a_run_without_a_checkpoint_is_complete_or_cannot_be_trained_on(
    config: SFTConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = left_by(config)
    assert not is_complete(config, None)
    write_summary(output_dir, {"steps": 100})
    assert is_complete(config, None)
    out = capsys.readouterr().out
    assert out.startswith(
        f"the run in {output_dir} is complete: it ended after step 100. It has no checkpoint "
        f"(checkpoint.at_end was false)"
    )
    assert f"model.path={output_dir}/huggingface, with another trainer.output_dir" in out
    more = replace(config, trainer=replace(config.trainer, total_steps=200))

    with pytest.raises(
        ValueError, match="ended after step 100, but 200 steps are requested. It has no checkpoint"
    ) as caught:
        is_complete(more, None)

    assert "\n" not in str(caught.value)
    write_summary(output_dir, {"steps": 100, "stopped_early": "none of the last 5 ..."})
    assert is_complete(more, None)
    other = replace(more, model=ModelConfig(path="other"))
    assert not is_complete(other, None)
    with pytest.raises(ValueError, match="another run"):
        claim(other)


def test_a_run_with_a_checkpoint_of_its_last_step_is_complete(
    config: SFTConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    early_stop = EarlyStopConfig(metric="val/loss", mode=MetricMode.min, patience=2)
    early = replace(config, trainer=replace(config.trainer, early_stop=early_stop))
    stopped = {"early_stop": {"metric": "val/loss", "mode": "min", "step": 3, "value": 0.5, "num_since": 2}}
    write_summary(left_by(config), {"steps": 5})
    assert not is_complete(config, resumed(is_own=True))
    assert not is_complete(config, resumed(is_own=True, **stopped))  # this command does not stop early
    assert is_complete(early, resumed(is_own=True, **stopped))
    out = capsys.readouterr().out
    assert (
        "step_00000005 is the checkpoint of step 5. It ended early: none of the last 2 validations of val/loss "
        "was better than 0.5 after step 3. " in out
    )
    assert "raise trainer.early_stop.patience (now 2), or set trainer.early_stop.metric=null" in out
    assert is_complete(replace(config, trainer=replace(config.trainer, total_steps=5)), resumed(is_own=True))
    assert "To train further, raise trainer.total_steps (now 5)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is not JSON"), ("[]", "has no number of steps"), ("{}", "has no number of steps")],
)
def test_a_damaged_summary_is_one_line(config: SFTConfig, content: str, said: str) -> None:
    (left_by(config) / "summary.json").write_text(content)
    with pytest.raises(ValueError, match=f"summary.json: {said}.*; remove it") as caught:
        is_complete(config, None)
    assert "\n" not in str(caught.value)
