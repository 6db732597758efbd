"""Rules for engines in block-scaled FP8: what a run refuses, and which layouts have whole blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.validate import validate
from megarl.machine.errors import ConfigError
from tests.families import example_fields
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

TP = "rollout.tensor_parallel_size"
CORRECTION = "algorithm.rollout_correction"
FP8 = ("rollout.dtype=fp8", "rollout.engine=sglang", f"{CORRECTION}.level=token")
# Four query heads and two key-value heads of 128 are whole blocks on one rank and on two.
WHOLE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
# Heads of 64 are whole blocks in pairs.
HALF_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
PARTIAL = {"intermediate_size": 1152}  # nine blocks, which only one rank has whole


def run(tmp_path: Path, **changes: Any) -> str:
    values = ppo_values(tmp_path)
    values["model"]["path"] = str(model_folder(tmp_path / "whole", **WHOLE | changes))
    return write_yaml(tmp_path / "run.yaml", values)


def violations(path: str, *overrides: str) -> list[str]:
    return [str(each) for each in validate(load_config(PPOConfig, path, [*FP8, *overrides]))]


@pytest.mark.parametrize(
    ("changes", "size"),
    [({}, 1), ({}, 2), ({}, 4), (HALF_HEADS, 1), (HALF_HEADS, 2), (PARTIAL, 1)],
)
def test_engines_with_whole_blocks_are_accepted(tmp_path: Path, changes: dict[str, Any], size: int) -> None:
    assert violations(run(tmp_path, **changes), f"{TP}={size}", "rollout.num_replicas=1") == []


@pytest.mark.parametrize(
    ("changes", "size", "message", "use"),
    [
        (
            HALF_HEADS,
            4,
            "rollout.dtype, rollout.tensor_parallel_size: is fp8, but a rank of an engine of 4 would have 64 "
            "rows of k_proj and v_proj of ",
            f"{TP}=2, or rollout.dtype=model",
        ),
        (
            PARTIAL,
            2,
            "would have 576 rows of gate_proj and up_proj of ",
            f"{TP}=1, or rollout.dtype=model",
        ),
        (
            {"intermediate_size": 1000},
            1,
            "would have 1000 rows of gate_proj and up_proj of ",
            "rollout.dtype=model",
        ),
    ],
)
def test_parts_of_blocks_are_refused(
    tmp_path: Path, changes: dict[str, Any], size: int, message: str, use: str
) -> None:
    (found,) = violations(run(tmp_path, **changes), f"{TP}={size}", "rollout.num_replicas=1")
    assert message in found
    assert found.endswith(f", and SGLang requires whole blocks of 128; use {use}")


# Sizes of DeepSeek-V3, with fewer layers.
LATENT = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("changes", "size", "groups", "refused"),
    [
        ({}, 16, 16, ""),
        ({}, 8, 1, ""),
        # A shared expert of 2,048 over 32 ranks, and an expert of 2,048 over 32 ranks.
        (
            {},
            32,
            1,
            "64 rows of gate_proj and up_proj of an expert, 64 rows of gate_proj and up_proj of shared",
        ),
        ({}, 32, 32, "64 rows of gate_proj and up_proj of shared experts"),
        ({"q_lora_rank": 1500}, 1, 1, "1500 rows of q_a_proj"),
        ({"v_head_dim": 72}, 16, 16, "1600 rows of kv_b_proj, 576 columns of o_proj"),
    ],
)
def test_experts_and_latent_attention(
    tmp_path: Path, changes: dict[str, Any], size: int, groups: int, refused: str
) -> None:
    path = run(tmp_path)
    folder = model_folder(tmp_path / "other")
    fields = example_fields("deepseek_v3") | LATENT | changes
    (folder / "config.json").write_text(json.dumps(fields))
    sizes = (f"{TP}={size}", f"rollout.expert_parallel_size={groups}", f"model.path={folder}")
    found = [each for each in violations(path, *sizes) if each.startswith("rollout.dtype")]
    assert len(found) == bool(refused)
    assert all(refused in each for each in found), found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.engine=hf"], "is fp8, but the engine hf computes in the dtype of the model"),
        (
            [f"{CORRECTION}.level=none"],
            "no correction is enabled; use algorithm.rollout_correction.level=token (truncated importance "
            "weights) or sequence, or rollout_correction.bypass=true",
        ),
        (["resharding.transport=folder"], "is fp8, but folders have the dtype of the model"),
        (
            ["actor.lora.rank=8", "actor.lora.sync=adapter"],
            "is fp8, but SGLang gets adapters on top of a model in its own dtype only; use "
            "actor.lora.sync=merged",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert any(message in each for each in violations(run(tmp_path), *overrides))


@pytest.mark.parametrize(
    "overrides", [[f"{CORRECTION}.level=sequence"], [f"{CORRECTION}.level=none", f"{CORRECTION}.bypass=true"]]
)
def test_the_difference_is_corrected(tmp_path: Path, overrides: list[str]) -> None:
    assert not any("no correction is enabled" in each for each in violations(run(tmp_path), *overrides))


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("qwen3_next", "gated delta nets"),
        ("nemotron_h", "Mamba-2 mixers"),
        ("qwen2_5_vl", "a vision tower"),
        ("gpt_oss", "experts with biases"),
    ],
)
def test_layers_that_sglang_does_not_quantize(tmp_path: Path, family: str, part: str) -> None:
    path = run(tmp_path)
    folder = model_folder(tmp_path / "other")
    (folder / "config.json").write_text(json.dumps(example_fields(family)))
    refused = [
        each for each in violations(path, f"model.path={folder}") if each.startswith("rollout.dtype: ")
    ]
    assert len(refused) == 1
    assert part in refused[0]
    assert refused[0].endswith(", which are not supported in FP8; use rollout.dtype=model")


@pytest.mark.parametrize(("name", "title"), [("mxfp8", "MXFP8"), ("nvfp4", "NVFP4")])
def test_other_formats_are_refused_by_name(tmp_path: Path, name: str, title: str) -> None:
    message = f"rollout.dtype: is '{name}', but {title} is not supported.*use fp8"
    with pytest.raises(ConfigError, match=message):
        load_config(PPOConfig, run(tmp_path), [f"rollout.dtype={name}"])
