"""Fields of latent attention and of DeepSeek's folders: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.shipped import CONFIGS_DIR
from megarl.machine.errors import ConfigError
from megarl.models.architecture import LatentAttention
from megarl.models.families import read_architecture
from megarl.weights.manifest import is_harmless_extra
from tests.families import example_fields

MODELS = CONFIGS_DIR / "models"


def refusal(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(example_fields("deepseek_v3") | changes))
    with pytest.raises(ConfigError) as refused:
        read_architecture(str(folder))
    return "; ".join(refused.value.problems)


def test_published_folders() -> None:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    common: dict[str, Any] = {**sizes, "norm_eps": 1e-6}
    for name, rank in (
        ("DeepSeek-V3.1-BF16", 1536),
        ("Kimi-K2-Instruct-BF16", 1536),
        ("Moonlight-16B-A3B-Instruct", None),
    ):
        architecture = read_architecture(str(MODELS / name), trust_remote_code=True)
        assert architecture.model_type == "deepseek_v3"
        assert architecture.latent == LatentAttention(q_lora_rank=rank, **common)
        assert (architecture.head_dim, architecture.value_dim, architecture.rotary_dim) == (192, 128, 64)


def test_their_code_is_accepted_if_the_user_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'auto_map' .*set model\.trust_remote_code=true"):
        read_architecture(str(MODELS / "Kimi-K2-Instruct-BF16"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_key_value_heads": 4}, "'num_key_value_heads' is 4, but must equal 'num_attention_heads' 8"),
        ({"v_head_dim": 25}, "'v_head_dim' is 25, but must be at most 24"),
        ({"qk_rope_head_dim": 7}, "rotary embeddings rotate pairs"),
        ({"qk_head_dim": 23}, "'qk_head_dim' is 23, but must be 'qk_nope_head_dim' + 'qk_rope_head_dim'"),
        ({"head_dim": 24}, "'head_dim' is 24, but must be 'qk_rope_head_dim', which is 8"),
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; only 'sigmoid' is supported"),
        ({"topk_method": "greedy"}, "'topk_method' is 'greedy'; only 'noaux_tc' is supported"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is 2; only 1 is supported"),
        ({"rope_interleave": False}, "'rope_interleave' is False; only true is supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    assert problem in refusal(tmp_path, **changes)


def test_a_folder_must_say_whether_queries_have_a_latent_vector(tmp_path: Path) -> None:
    fields = {name: value for name, value in example_fields("deepseek_v3").items() if name != "q_lora_rank"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="field 'q_lora_rank' is missing"):
        read_architecture(str(tmp_path))


def test_tensors_of_layers_that_predict_further_tokens_are_ignored() -> None:
    """DeepSeek-V3 has one such layer, number 61, after its 61 layers."""
    architecture = read_architecture(str(MODELS / "DeepSeek-V3.1-BF16"), trust_remote_code=True)
    assert is_harmless_extra("model.layers.61.eh_proj.weight", architecture, "lm")
    assert not is_harmless_extra("model.layers.60.eh_proj.weight", architecture, "lm")
    assert not is_harmless_extra("model.layers.62.eh_proj.weight", architecture, "lm")
