"""Sparse attention: which rows it leaves dense, by transformers' own classes, its sizes and its fields."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from megarl.config.shipped import CONFIGS_DIR
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture, Indexer
from megarl.models.counts import num_parameters, training_flops
from megarl.models.families import read_architecture
from megarl.models.sparse_attention import indexer_of
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


@pytest.mark.parametrize(("name", "layers"), [("DeepSeek-V3.2-BF16", 61), ("GLM-5", 78)])
def test_published_folders(name: str, layers: int) -> None:
    architecture = published(name)
    is_glm = name == "GLM-5"
    assert architecture.indexer == Indexer(
        topk=2048,
        num_heads=32 if is_glm else 64,
        head_dim=128,
        pairs_neighbors=is_glm,
        layers=tuple(range(layers)),
    )
    of_indexer = "model.layers.{}.self_attn.indexer.wq_b.weight"
    assert not is_kept(of_indexer.format(layers - 1), architecture)
    assert is_kept(of_indexer.format(layers), architecture)  # of the layer that predicts further tokens
    assert not is_kept(of_indexer.format(layers + 1), architecture)


def test_parameters_and_operations_of_indexers() -> None:
    """Worked out from the sizes of DeepSeek-V3.2."""
    sparse = published("DeepSeek-V3.2-BF16")
    dense = read_architecture(str(MODELS / "DeepSeek-V3.1-BF16"), trust_remote_code=True)
    assert sparse.latent == dense.latent

    matrices = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168
    assert num_parameters(sparse) - num_parameters(dense) == 61 * (matrices + 2 * 128)
    assert num_parameters(sparse, trained_only=True) == num_parameters(dense, trained_only=True)

    # A query sees 2,048 of up to 8,192 keys. A pair costs 192 numbers for the key and 128 for the value in each
    # of 128 heads, and 64 * 128 in the indexer. Frozen indexers have no backward pass.
    length = 8192
    pairs = length * (length + 1) // 2
    seen = 2048 * 2049 // 2 + (length - 2048) * 2048
    of_attention = 2 * 3 * 61 * (pairs - seen) * 128 * (192 + 128)
    of_indexers = 2 * 61 * (length * matrices + pairs * 64 * 128)
    rows = [(length - 1, 1)]
    saved = training_flops(dense, rows) - training_flops(sparse, rows)
    assert saved == of_attention - of_indexers
    trained = replace(sparse, indexer=replace(indexer_of(sparse), trains=True))
    assert training_flops(trained, rows) - training_flops(sparse, rows) == 2 * of_indexers


def test_other_names_of_layers_do_not_change_the_model(tmp_path: Path) -> None:
    """The one is transformers' name before version 5.19, and GLM-5.2 has another size in `head_dim`."""
    expected = read_architecture(str(written(tmp_path, "glm_moe_dsa")))
    changes = {
        "layer_types": ["deepseek_sparse_attention"] * 4,
        "head_dim": 192,
        "moe_router_dtype": "float32",
        "index_topk_freq": 1,
    }
    assert read_architecture(str(written(tmp_path, "glm_moe_dsa", **changes))) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index_topk_freq": 2},
        {"index_topk_freq": 3, "index_skip_topk_offset": 3},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"index_topk_pattern": "FSSF"},
        {"index_topk_pattern": "FSSF", "indexer_types": ["full", "full", "shared", "full"]},
    ],
)
def test_layers_that_share_a_selection_are_those_of_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = written(tmp_path, "glm_moe_dsa", **changes)
    kinds = AutoConfig.from_pretrained(folder).indexer_types
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
    assert indexer_of(read_architecture(str(folder))).layers == layers


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"index_topk": None}, "field 'index_topk' is missing"),
        ({"index_head_dim": 4}, "'index_head_dim' is 4, but must be at least 'qk_rope_head_dim', which is 8"),
        ({"index_topk_freq": 2}, "transformers' class of this family has an indexer in every layer"),
        ({"indexer_types": ["full"] * 3}, "must have 'full' or 'shared' for each layer (4 in all)"),
        ({"index_topk_pattern": "SFFF"}, "but the first layer has no selection to share"),
        (
            {"indexer_rope_interleave": True},
            "field 'indexer_rope_interleave' is True; only False is supported",
        ),
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
