"""DeepSeek-V3.2 and GLM-5: the layers of DeepSeek-V3 with sparse attention (DSA, DeepSeek-AI 2025).

An indexer selects `index_topk` keys for each token. In a row of at most that many tokens it selects all of
them, so that the layers are those of DeepSeek-V3, and megarl trains on such rows only
(`Architecture.row_limit`). Indexers are kept as they are. SGLang serves the model without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.deepseek import DEEPSEEK_ROWS, DEEPSEEK_V3, FIXED, read_deepseek, sglang_differs
from megarl.models.family import Family, SGLangStages
from megarl.models.mapping import HF_LAYER, is_sparse

_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # transformers' names, newer and older
# How an indexer computes its scores, and in which layers it reuses the selection of an earlier layer.
_FLAGS_OF_INDEXERS = ("indexer_rope_interleave", "index_share_for_mtp_iteration")
_SHARING = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern", "indexer_types")


def _read(reader: ConfigReader) -> Architecture:
    index_topk = reader.number("index_topk", int)
    for name in ("index_n_heads", "index_head_dim"):
        reader.number(name, int)
    for name in _FLAGS_OF_INDEXERS:
        reader.flag(name)
    for name in _SHARING:
        reader.take(name)
    if reader.take("moe_router_dtype") not in (None, "float32"):
        reader.refuse("moe_router_dtype", "only 'float32' is supported")

    # transformers' classes have no other rotation, and no queries without a latent vector.
    if reader.fields.get("rope_interleave") is False:
        reader.refuse("rope_interleave", "only true is supported")
    if reader.fields.get("q_lora_rank", 1) is None:
        reader.refuse("q_lora_rank", "only models with a latent vector of queries are supported")

    # The size of a head follows from others in transformers, and GLM-5.2 has another one in this field.
    inner = {name: value for name, value in reader.fields.items() if name not in ("layer_types", "head_dim")}
    if inner.get("rope_interleave") is None:
        inner["rope_interleave"] = True
    reader.take("head_dim")
    architecture = replace(read_deepseek(replace(reader, fields=inner)), index_topk=index_topk)
    _check_types_of_layers(reader, architecture)
    return architecture


def _check_types_of_layers(reader: ConfigReader, architecture: Architecture) -> None:
    """Refuse lists that contradict the fields that Megatron and SGLang read."""
    layers = range(architecture.num_hidden_layers)
    kinds = reader.take("layer_types")
    if kinds is not None and kinds not in [[kind for _ in layers] for kind in _LAYER_TYPES]:
        reader.conflict(
            f"field 'layer_types' is {kinds!r}; only {_LAYER_TYPES[0]!r} in every layer is supported",
            "num_hidden_layers",
        )

    feed_forwards = reader.take("mlp_layer_types")
    expected = ["sparse" if is_sparse(architecture, layer) else "dense" for layer in layers]
    if feed_forwards is not None and feed_forwards != expected:
        reader.conflict(
            f"field 'mlp_layer_types' is {feed_forwards!r}; must be dense in the first "
            "'first_k_dense_replace' layers, and sparse after them",
            "num_hidden_layers",
            "first_k_dense_replace",
        )


def _example(model_type: str, class_prefix: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSeek-V3's example with indexers."""
    return {
        **DEEPSEEK_V3.example(),
        "architectures": [f"{class_prefix}ForCausalLM"],
        "model_type": model_type,
        "index_topk": 128,
        "index_n_heads": 4,
        "index_head_dim": 16,
        **changes,
    }


def _family(model_type: str, class_prefix: str, models: str, changes: Mapping[str, Any]) -> Family:
    """Return a family.

    Args:
        model_type: The field of `config.json`.
        changes: The fields in which its example differs from DeepSeek-V3's.
    """
    return Family(
        model_type=model_type,
        class_prefix=class_prefix,
        read=_read,
        rows=DEEPSEEK_ROWS,
        example=partial(_example, model_type, class_prefix, changes),
        kept={f"{HF_LAYER}self_attn.indexer.": "the indexers of sparse attention"},
        sglang_stages=SGLangStages(),
        sglang_fields=FIXED,
        # SGLang's classes of these models differ from it in nothing but their indexers.
        sglang_policy_class="DeepseekV2ForCausalLM",
        sglang_differs=sglang_differs,
        models=models,
        limits=(
            "rows of at most `index_topk` (2,048) tokens, in which sparse attention is dense; indexers are "
            "not trained, but [kept](moe.md#sparse-attention)",
            *DEEPSEEK_V3.limits,
        ),
    )


DEEPSEEK_V32 = _family("deepseek_v32", "DeepseekV32", "DeepSeek-V3.2 and V3.2-Exp", {})
GLM_MOE_DSA = _family(
    "glm_moe_dsa",
    "GlmMoeDsa",
    "GLM-5 and its later versions of the same class",
    {"rope_theta": 1e6, "rope_scaling": None, "rms_norm_eps": 1e-5, "n_group": 1, "n_shared_experts": 1},
)
