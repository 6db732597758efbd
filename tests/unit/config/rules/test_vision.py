"""Rules for models that read images: each unsupported combination has one violation with a remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.validate import validate
from megarl.models.families import FAMILIES
from tests.unit.config.folders import ppo_values, write_yaml


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    """All roles have a tiny Qwen3-VL with four layers, to the first two of which features are added."""
    values = ppo_values(tmp_path)
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(FAMILIES["qwen3_vl"].example()))
    values["model"]["path"] = str(folder)
    values["critic"].pop("model", None)
    values["rollout"]["engine"] = "hf"
    values["device"] = "cpu"
    return write_yaml(tmp_path / "run.yaml", values)


def violations(path: str, *overrides: str) -> list[str]:
    return [str(violation) for violation in validate(load_config(PPOConfig, path, list(overrides)))]


def test_a_good_run_has_none(ppo: str) -> None:
    assert violations(ppo) == []
    assert violations(ppo, "actor.freeze_vision=true") == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("engine.packing=false", "engine.packing: is false, but .* reads images, whose positions .*use true"),
        (
            "critic.parallel.pipeline_parallel_size=4",
            r"the first of 4 \(virtual\) stages has 1 layer of .*, but features of images are added to the first 2 "
            "layers, which it must have; use at most 2 stages",
        ),
        ("actor.lora.rank=4", "has a vision tower, with which adapters are not supported yet; use null"),
        ("rollout.engine=sglang", "reads images, which the engine 'sglang' supports on CUDA only"),
        ("critic.model.path={model}", "has no vision tower, so the critic would not see the images"),
        ("agent.tools=[tools.py:price]", "which requests of episodes do not contain yet"),
    ],
)
def test_what_images_do_not_allow(ppo: str, tmp_path: Path, override: str, problem: str) -> None:
    found = violations(ppo, override.format(model=tmp_path / "model") if "{model}" in override else override)
    assert any(re.search(problem, violation) for violation in found), found


def test_a_layout_is_told_the_layers_of_its_first_stage(ppo: str) -> None:
    stages = "critic.parallel.pipeline_parallel_size=2"
    (found,) = violations(ppo, stages, "critic.parallel.pipeline_layout=[1,3]")
    assert found.startswith(
        "critic.parallel.pipeline_layout: the first of 2 (virtual) stages has 1 layer of "
    )
    assert found.endswith("which it must have; give the first stage at least 2 layers")
    assert violations(ppo, stages, "critic.parallel.pipeline_layout=[3,1]") == []


def test_experts_with_images_need_a_gpu(ppo: str, tmp_path: Path) -> None:
    (tmp_path / "images" / "config.json").write_text(json.dumps(FAMILIES["qwen3_vl_moe"].example()))
    sharded = "actor.parallel.sequence_parallel=true"
    (found,) = violations(ppo, sharded, "rollout.engine=sglang")
    assert found.endswith("because its image processors import compiled kernels; use device=cuda")
    (found,) = violations(ppo, sharded)
    assert re.search("'hf' does not support mixture-of-experts models .*; use sglang", found)


def test_a_frozen_tower_of_a_model_without_one(ppo: str, tmp_path: Path) -> None:
    (found,) = violations(ppo, f"model.path={tmp_path / 'model'}", "actor.freeze_vision=true")
    assert "actor.freeze_vision: is true, but" in found
    assert "has no vision tower; remove it" in found
