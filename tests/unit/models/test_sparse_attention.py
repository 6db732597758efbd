"""Sparse attention: which rows it leaves dense, by transformers' own classes, and the fields of its folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.shipped import CONFIGS_DIR
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture, RowLimit
from megarl.models.families import read_architecture
from megarl.weights.manifest import is_kept
from tests.families import example_config, example_fields, new_model

MODELS = CONFIGS_DIR / "models"


def written(folder: Path, family: str, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(example_fields(family) | changes))
    return folder


def published(name: str) -> Architecture:
    return read_architecture(str(MODELS / name))


def test_up_to_index_topk_tokens_it_is_the_attention_of_deepseek_v3() -> None:
    """One more token, and the two differ. megarl's layers are compared with both in test_parity.py."""
    torch.manual_seed(0)
    sparse = new_model(example_config("deepseek_v32", index_topk=16)).eval()
    with torch.no_grad():
        for parameter in sparse.parameters():
            parameter.normal_(std=0.2)
    dense = new_model(example_config("deepseek_v3")).eval()
    dense.load_state_dict(
        {name: value for name, value in sparse.state_dict().items() if ".indexer." not in name}
    )

    ids = torch.randint(199, (1, 17))
    with torch.no_grad():
        for length, is_same in ((16, True), (17, False)):
            difference = sparse(ids[:, :length]).logits - dense(ids[:, :length]).logits
            assert (float(difference[0, -1].abs().max()) < 1e-5) is is_same


def test_published_folders() -> None:
    for name, layers in (("DeepSeek-V3.2-BF16", 61), ("GLM-5", 78)):
        architecture = published(name)
        assert architecture.row_limit == RowLimit(2048, "index_topk")
        of_indexer = "model.layers.{}.self_attn.indexer.wq_b.weight"
        assert is_kept(of_indexer.format(layers - 1), architecture)
        assert is_kept(of_indexer.format(layers), architecture)  # of the layer that predicts further tokens
        assert not is_kept(of_indexer.format(layers + 1), architecture)
        assert not is_kept("model.layers.0.self_attn.q_b_proj.weight", architecture)
    assert published("DeepSeek-V3.2-BF16").latent == published_dense().latent


def published_dense() -> Architecture:
    return read_architecture(str(MODELS / "DeepSeek-V3.1-BF16"), trust_remote_code=True)


def test_positions_limit_rows_too(tmp_path: Path) -> None:
    architecture = read_architecture(str(written(tmp_path, "glm_moe_dsa", max_position_embeddings=100)))
    assert architecture.row_limit == RowLimit(100, "max_position_embeddings")
    assert published_dense().row_limit == RowLimit(163840, "max_position_embeddings")


@pytest.mark.parametrize(
    "changes",
    [
        # transformers' name before version 5.19
        {"layer_types": ["deepseek_sparse_attention"] * 4},
        # GLM-5.2 shares selections between layers, and has the size of another part of a head in this field.
        {"index_topk_freq": 4, "index_skip_topk_offset": 3, "head_dim": 192, "moe_router_dtype": "float32"},
        {"indexer_types": ["full", "shared", "shared", "shared"]},
    ],
)
def test_what_concerns_longer_rows_only_does_not_change_the_model(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    expected = read_architecture(str(written(tmp_path, "glm_moe_dsa")))
    assert read_architecture(str(written(tmp_path, "glm_moe_dsa", **changes))) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"index_topk": None}, "field 'index_topk' is missing"),
        ({"n_group": None}, "field 'n_group' is missing"),
        ({"q_lora_rank": None}, "field 'q_lora_rank' is None; only models with a latent vector"),
        ({"rope_interleave": False}, "field 'rope_interleave' is False; only true is supported"),
        ({"moe_router_dtype": "bfloat16"}, "'moe_router_dtype' is 'bfloat16'; only 'float32' is supported"),
        ({"layer_types": ["full_attention"] * 4}, "; only 'indexed_attention' in every layer is supported"),
        ({"mlp_layer_types": ["sparse"] * 4}, "must be dense in the first 'first_k_dense_replace' layers"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_architecture(str(written(tmp_path, "deepseek_v32", **changes)))
    assert problem in "; ".join(refused.value.problems)
