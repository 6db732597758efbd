"""A run on real Ray that trains a vision-language model on images for two steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from examples.shapes import prepare
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from tests.integration.tiny_run import run_ppo

EXAMPLE = Path(__file__).parents[2] / "examples" / "shapes" / "grpo.yaml"
pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_tower_is_trained_pushed_and_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old log-probs are scored, since a step has two updates."""
    monkeypatch.setattr(prepare, "NUM_TRAIN", 16)
    monkeypatch.setattr(prepare, "NUM_VALIDATION", 4)
    prepare.prepare(tmp_path, seed=0)
    config = load_config(
        PPOConfig,
        EXAMPLE,
        [
            f"model.path={tmp_path / 'model'}",
            f"data.train_files=[{tmp_path / 'data' / 'train.parquet'}]",
            f"data.val_files=[{tmp_path / 'data' / 'validation.parquet'}]",
            f"trainer.output_dir={tmp_path / 'run'}",
            "rollout.n=4",
            "trainer.total_steps=2",
            "trainer.prompts_per_step=8",
            "trainer.updates_per_step=2",
            "trainer.validate_every_steps=2",
            "checkpoint.at_end=false",
            "tracking.loggers=[jsonl]",
        ],
    )
    finished = run_ppo(config)

    # The engine and the trainer read the same images: their log-probs agree, before and after a weight sync.
    steps = [line for line in finished.metrics if line["step"]]
    assert len(steps) == 2
    for line in steps:
        assert line["training/rollout_log_probs_diff_max"] < 1e-4
    assert steps[0]["actor/grad_norm"] > 0

    # The folder is one that transformers reads, with a tower that was trained.
    _, info = AutoModelForImageTextToText.from_pretrained(finished.policy, output_loading_info=True)
    assert not any(info.values())
    assert (finished.policy / "preprocessor_config.json").is_file()
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(finished.policy / "model.safetensors")
    assert before.keys() == after.keys()
    tower = [name for name in before if ".visual." in name]
    assert sum(not torch.equal(before[name], after[name]) for name in tower) == len(tower)
