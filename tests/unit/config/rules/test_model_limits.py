"""Models that SGLang has no class for or computes differently, and the lengths that models take."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.validate import validate
from megarl.models.families import FAMILIES
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

ENGINE = "rollout.engine=sglang"


def violations(path: str, *overrides: str) -> list[str]:
    return [str(violation) for violation in validate(load_config(PPOConfig, path, overrides))]


def test_a_family_without_a_class_is_generated_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))
    monkeypatch.setitem(FAMILIES, "qwen2", replace(FAMILIES["qwen2"], sglang_class=False))
    (found,) = violations(path, ENGINE)
    assert found.startswith("rollout.engine: SGLang has no class for ")
    assert found.endswith("(qwen2); use hf")
    assert violations(path, "rollout.engine=hf") == []


def test_a_factor_of_yarn_that_sglang_does_not_read(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))

    def found(**scaling: float) -> list[str]:
        folder = model_folder(tmp_path / f"model{len(scaling)}", rope_scaling=yarn | scaling)
        return violations(run, ENGINE, f"model.path={folder}")

    assert found() == []
    (said,) = found(attention_factor=1.5)
    assert "a YaRN attention_factor of 1.5, for which it uses 1.13863" in said


def test_names_of_layers_that_sglang_does_not_know(tmp_path: Path) -> None:
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))

    def found(fields: dict[str, object]) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(fields))
        given = violations(run, ENGINE, f"model.path={tmp_path}", "device=cuda")
        return [each for each in given if "layers_block_type" in each]

    fields = FAMILIES["nemotron_h"].example()
    (said,) = found(fields)
    assert "SGLang's nemotron_h refuses the config.json of " in said
    assert said.endswith("by 'hybrid_override_pattern': 'M*E-ME*-', as published folders have it")
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    names = [older.get(kind, kind) for kind in fields.pop("layers_block_type")]
    assert found(fields | {"layers_block_type": names}) == []
    assert found(fields | {"hybrid_override_pattern": "M*E-ME*-"}) == []


def test_a_class_of_sglang_that_needs_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["minimax_m2"].example()))
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))
    lack = (
        "(minimax_m2) has norms over all heads, which SGLang's class computes on GPUs only; use device=cuda"
    )

    def found(device: str) -> list[str]:
        given = violations(run, ENGINE, f"model.path={tmp_path}", f"device={device}")
        return [each for each in given if lack in each]

    assert len(found("cpu")) == 1
    assert found("cuda") == []


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text", "olmo3", "qwen3"])
def test_windows_and_sinks_have_no_float32_kernels_on_cuda(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family].example()))
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))

    def found(*overrides: str) -> list[str]:
        given = violations(run, ENGINE, f"model.path={tmp_path}", *overrides)
        return [each for each in given if "no float32 kernels on CUDA" in each]

    refused = found("device=cuda", "model.dtype=float32")
    assert bool(refused) is (family != "qwen3")
    assert all(f"({family}) has sinks or windows" in each for each in refused)
    assert found("device=cuda", "model.dtype=bfloat16") == []
    assert found("device=cpu", "model.dtype=float32") == []


def test_a_context_that_yarn_extends_needs_the_new_length(tmp_path: Path) -> None:
    """The model has 64 positions, and the run's rows have 80 tokens."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))
    folder = model_folder(tmp_path / "extended", rope_scaling=yarn)
    longer = ["data.max_response_length=72", "actor.micro_batch.max_tokens=128"]
    found = violations(run, f"model.path={folder}", f"critic.model.path={folder}", *longer)
    said = [line for line in found if "exceed max_position_embeddings 64" in line]
    assert said
    assert all(
        "or set max_position_embeddings to 128 in config.json, to which YaRN extends" in line for line in said
    )


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_only_an_engine_on_a_cpu_limits_rows_to_the_selected_keys(tmp_path: Path, family: str) -> None:
    """The model selects 28 keys and has 256 positions. Prompts have up to 16 tokens."""
    fields = FAMILIES[family].example() | {"index_topk": 28}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))

    def found(response: int, device: str) -> list[str]:
        models = [f"model.path={tmp_path}", f"critic.model.path={tmp_path}", f"device={device}"]
        given = violations(run, ENGINE, *models, f"data.max_response_length={response}")
        return [each for each in given if "index_topk" in each]

    assert found(13, "cuda") == found(12, "cpu") == []
    (refused,) = found(13, "cpu")
    assert "is cpu, and rows may have 29 tokens, but SGLang has sparse attention on GPUs only" in refused
    assert "serves rows of at most index_topk 28 tokens of " in refused
    assert refused.endswith("; use device=cuda, or shorter rows")


def test_layers_that_share_a_selection_need_packed_rows_and_stages_that_select(tmp_path: Path) -> None:
    fields = FAMILIES["glm_moe_dsa"].example() | {"index_topk": 20, "indexer_types": ["full", "shared"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))

    def found(*overrides: str) -> list[str]:
        given = violations(run, f"model.path={tmp_path}", "device=cuda", *overrides)
        return [each for each in given if "share the selection" in each]

    stages = "actor.parallel.pipeline_parallel_size=2"
    assert found() == found(stages) == []
    (padded,) = {each.partition(": ")[2] for each in found("engine.packing=false") if "false" in each}
    assert padded.endswith("which needs packed rows; use true")
    (uneven,) = found(stages, "actor.parallel.pipeline_layout=[1,3]")
    assert "a (virtual) pipeline stage begins with layer 1, but " in uneven
    assert "let stages begin with layers among [0, 2]" in uneven

    # In short rows, every layer sees all keys.
    short = "data.max_response_length=4"
    assert found(short, "engine.packing=false") == []


def test_only_models_with_indexers_train_them(tmp_path: Path) -> None:
    key = "model.sparse_attention.indexer_loss_coefficient"
    run = write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))

    def found(family: str, *overrides: str) -> list[str]:
        folder = tmp_path / family
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(FAMILIES[family].example()))
        given = violations(run, f"model.path={folder}", f"{key}=0.01", *overrides)
        return [each for each in given if "indexer_loss_coefficient" in each]

    assert found("deepseek_v32") == []
    (refused,) = found("deepseek_v3")
    assert "(deepseek_v3) has no sparse attention; remove it" in refused
    (frozen,) = found("deepseek_v32", "actor.lora.rank=8")
    assert "is 0.01, which trains indexers, but with adapters the model is frozen; use 0" in frozen
