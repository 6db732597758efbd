"""Whose folder it is: a run takes a new one, goes on in its own, and leaves those of others alone."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megarl.cli.session import _claim
from megarl.config.load import dump_config
from megarl.config.schema import CheckpointConfig, ModelConfig, SFTConfig, SFTDataConfig, SFTTrainerConfig
from megarl.trainers.resume import Resume


@pytest.fixture
def config(tmp_path: Path) -> SFTConfig:
    return SFTConfig(
        model=ModelConfig(path="model"),
        data=SFTDataConfig(train_files=["train.parquet"]),
        checkpoint=CheckpointConfig(every_steps=5),
        trainer=SFTTrainerConfig(output_dir=str(tmp_path / "run")),
    )


def left_by(config: SFTConfig) -> Path:
    """What a run leaves that was killed early."""
    output_dir = Path(config.trainer.output_dir)
    dump_config(config, output_dir / "config.yaml")
    (output_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    (output_dir / "generations.jsonl").touch()
    return output_dir


def claim(config: SFTConfig, resume: Resume | None = None) -> str:
    written = io.StringIO()
    _claim(Path(config.trainer.output_dir), config, resume, Console(file=written, width=200))
    return written.getvalue()


def resumed(is_own: bool) -> Resume:
    return Resume(checkpoint=Path("step_00000005"), step=5, state={}, differences=[], is_own=is_own)


def test_a_new_folder_is_made(config: SFTConfig) -> None:
    assert claim(config) == ""
    assert Path(config.trainer.output_dir).is_dir()


def test_a_run_that_died_before_its_first_checkpoint_starts_over(config: SFTConfig) -> None:
    output_dir = left_by(config)
    assert "starting over" in claim(config)
    assert sorted(path.name for path in output_dir.iterdir()) == ["config.yaml"]


def test_weights_that_were_on_their_way_through_the_disk_are_removed(config: SFTConfig) -> None:
    output_dir = left_by(config)
    (output_dir / ".weights-3-abc" / "model").mkdir(parents=True)
    claim(config, resumed(is_own=True))
    assert not (output_dir / ".weights-3-abc").exists()


def test_a_run_that_goes_on_keeps_its_metrics(config: SFTConfig) -> None:
    output_dir = left_by(config)
    claim(config, resumed(is_own=True))
    assert (output_dir / "metrics.jsonl").exists()


def test_folders_of_other_runs_are_refused_and_left_alone(config: SFTConfig) -> None:
    others = {
        "it saves nothing": replace(config, checkpoint=CheckpointConfig()),
        "it is told not to resume": replace(config, checkpoint=CheckpointConfig(every_steps=5, resume="disable")),
        "its data are in another order": replace(config, data=SFTDataConfig(train_files=["train.parquet"], seed=3)),
    }
    output_dir = left_by(config)
    for why, other in others.items():
        with pytest.raises(ValueError, match="holds the metrics of another run"):
            claim(other)
        assert (output_dir / "metrics.jsonl").exists(), why
    with pytest.raises(ValueError, match="another run"):
        claim(config, resumed(is_own=False))
    (output_dir / "summary.json").touch()  # it was complete
    with pytest.raises(ValueError, match="another run"):
        claim(config)
    assert (output_dir / "metrics.jsonl").exists()
