"""DeepSeek-V2 to V3.2, models published as the class of V3 (Kimi-K2 and Moonlight), GLM-4.5 to 4.7 and GLM-5.

GLM-4.5, 4.6 and 4.7 have grouped-query attention, and experts as in DeepSeek-V3. DeepSeek-V3.2 and GLM-5 have
sparse attention: an indexer selects `index_topk` keys for each token. In a row of at most that many tokens it
selects all of them, so that the layers are those of DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.models.architecture import Architecture, YarnScaling
from megarl.models.config_reader import ConfigReader
from megarl.models.experts import (
    SELECTION_BIAS_ROW,
    check_feed_forwards,
    expert_rows,
    num_dense_layers,
    read_sigmoid_experts,
    read_unnormalized_experts,
    shared_expert_rows,
    with_one_dense_layer,
)
from megarl.models.family import Family, SGLangStages
from megarl.models.latent import LATENT_ROWS, read_latent
from megarl.models.sparse_attention import INDEXER_ROWS, read_indexer
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk, trunk_rows

_MODEL_TYPE = "deepseek_v3"

# Fields of the published model code that select variants, with the one that a family computes.
_FIXED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_FIXED_IN_V2 = {"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy"}
# Fields that DeepSeek-V2 has not, or that have another meaning there.
_NOT_IN_V2 = ("rope_interleave", "n_group", "topk_group", "num_nextn_predict_layers")
_EXPERT_ROWS = (
    *expert_rows("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    SELECTION_BIAS_ROW,
    *shared_expert_rows("mlp.shared_experts"),
)
_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # transformers' names, newer and older


def _read_layers(reader: ConfigReader) -> Architecture:
    """Read a model with the layers of DeepSeek-V3."""
    _read_variant(reader, _FIXED)
    return read_trunk(reader, read_experts=read_sigmoid_experts, read_latent=read_latent, may_have_mtp=True)


def _read_variant(reader: ConfigReader, fixed: Mapping[str, Any]) -> None:
    for name, supported in fixed.items():
        reader.require(name, supported, f"only {supported!r} is supported")
    # Fields of DeepSeek's own training and serving.
    for name in ("aux_loss_alpha", "ep_size", "seq_aux"):
        reader.take(name)


def _read_v2(reader: ConfigReader) -> Architecture:
    """Read DeepSeek-V2, whose rotation of attention has no field in transformers.

    Routers with the method `greedy` have no groups, whatever the fields of groups are.
    """
    _read_variant(reader, _FIXED_IN_V2)
    for name in ("n_group", "topk_group"):
        reader.take(name)
    inner = replace(reader, fields={"rope_interleave": True, **reader.fields})
    return read_trunk(inner, read_experts=read_unnormalized_experts, read_latent=read_latent)


def _read_lite(reader: ConfigReader) -> Architecture:
    """Read GLM-4.7-Flash."""
    architecture = _read_layers(with_one_dense_layer(reader))
    check_feed_forwards(reader, architecture, has_one_dense=True)
    return architecture


def _read_sparse(reader: ConfigReader, *, is_glm: bool) -> Architecture:
    """Read a model with indexers (DSA, DeepSeek-AI 2025).

    The indexers of GLM rotate like its attention, and some of its models have them in a part of the layers.
    """
    indexer = read_indexer(reader, pairs_neighbors=is_glm, may_share=is_glm)
    reader.require("moe_router_dtype", "float32", "only 'float32' is supported")

    # transformers' classes have no queries without a latent vector.
    if reader.fields.get("q_lora_rank", 1) is None:
        reader.refuse("q_lora_rank", "only models with a latent vector of queries are supported")

    # The size of a head follows from others in transformers, and GLM-5.2 has another one in this field.
    inner = {name: value for name, value in reader.fields.items() if name not in ("layer_types", "head_dim")}
    # They have one rotation, whose field may be missing or null.
    if inner.get("rope_interleave") is None:
        inner["rope_interleave"] = True
    reader.take("head_dim")
    architecture = replace(_read_layers(replace(reader, fields=inner)), indexer=indexer)
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

    check_feed_forwards(reader, architecture)


# The example is a tiny model with YaRN, and experts in two groups, of which a token selects one.
DEEPSEEK_V3 = Family(
    model_type=_MODEL_TYPE,
    sglang_groups=True,
    class_prefix="DeepseekV3",
    # Kimi-K2 has a name of its own.
    read=lambda reader: replace(_read_layers(reader), model_type=_MODEL_TYPE),
    rows=(*trunk_rows(LATENT_ROWS), *_EXPERT_ROWS),
    example_fields=EXAMPLE
    | {
        "num_key_value_heads": 8,
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "original_max_position_embeddings": 32,
        },
        "rope_interleave": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    },
    sglang_stages=SGLangStages.plain,
    sglang_fields=_FIXED,
    sglang_differences={
        "a tied embedding": lambda architecture: architecture.tie_word_embeddings,
        "a RoPE scaling other than yarn": lambda architecture: (
            not isinstance(architecture.rope_scaling, YarnScaling | None)
        ),
    },
    models="DeepSeek-V3, R1 and V3.1, Kimi-K2 (`kimi_k2`), Moonlight",
    limits=(
        "layers that predict further tokens are not trained, but "
        "[kept](large_models.md#multi-token-prediction)",
    ),
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    sglang_groups=False,
    class_prefix="DeepseekV2",
    read=_read_v2,
    rows=tuple(row for row in DEEPSEEK_V3.rows if row is not SELECTION_BIAS_ROW),
    # DeepSeek-V2-Lite projects queries directly.
    example_fields={
        name: value for name, value in DEEPSEEK_V3.example_fields.items() if name not in _NOT_IN_V2
    }
    | {"q_lora_rank": None, "norm_topk_prob": False, "topk_method": "greedy"},
    sglang_fields=_FIXED_IN_V2,
    # SGLang reads groups with every method.
    sglang_replaced=lambda fields: {"n_group": 1, "topk_group": 1},
    models="DeepSeek-V2-Lite and DeepSeek-Coder-V2-Lite",
    limits=(
        "routers that select groups of experts, as those of DeepSeek-V2 with 236 B parameters, are refused",
    ),
)
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    sglang_groups=False,
    class_prefix="Glm4MoeLite",
    read=_read_lite,
    # The value of a head is as large as its key.
    example_fields=DEEPSEEK_V3.example_fields
    | {
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "v_head_dim": 24,
        "n_group": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.8,
    },
    sglang_stages=SGLangStages.head_on_every,
    sglang_fields={},
    sglang_derived=num_dense_layers,
    models="GLM-4.7-Flash",
)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    class_prefix="DeepseekV32",
    read=partial(_read_sparse, is_glm=False),
    rows=(*trunk_rows((*LATENT_ROWS, *INDEXER_ROWS)), *_EXPERT_ROWS),
    example_fields=DEEPSEEK_V3.example_fields
    | {"index_topk": 128, "index_n_heads": 16, "index_head_dim": 16},
    # It differs from SGLang's classes of models with sparse attention in nothing but their indexers.
    sglang_cpu_class="DeepseekV2ForCausalLM",
    models="DeepSeek-V3.2 and V3.2-Exp",
    limits=(
        "SGLang serves rows of at most `index_topk` (2,048) tokens on a CPU; kernels for CUDA that skip keys "
        "are not used ([sparse attention](large_models.md#sparse-attention))",
        *DEEPSEEK_V3.limits,
    ),
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    class_prefix="GlmMoeDsa",
    read=partial(_read_sparse, is_glm=True),
    # transformers' class has no such field.
    sglang_fields={**DEEPSEEK_V3.sglang_fields, "indexer_rope_interleave": True},
    example_fields=DEEPSEEK_V32.example_fields
    | {"rope_theta": 1e6, "rope_scaling": None, "rms_norm_eps": 1e-5, "n_group": 1, "n_shared_experts": 1},
    models="GLM-5 and its later versions of the same class",
)


def _read_glm(reader: ConfigReader) -> Architecture:
    # In this family, `attention_bias` does not concern the output projection.
    return read_trunk(
        reader,
        qkv_bias=reader.flag("attention_bias"),
        qk_norm=reader.flag("use_qk_norm"),
        read_experts=read_sigmoid_experts,
        may_have_mtp=True,
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    sglang_groups=True,
    class_prefix="Glm4Moe",
    read=_read_glm,
    rows=(*TRUNK_ROWS, *_EXPERT_ROWS),
    example_fields=EXAMPLE
    | {
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
    sglang_stages=SGLangStages.head_on_every,
    sglang_differences={"a tied embedding": lambda architecture: architecture.tie_word_embeddings},
    models="GLM-4.5, 4.6 and 4.7 and their Air models",
    limits=(
        "layers that predict further tokens are not trained, but "
        "[kept](large_models.md#multi-token-prediction)",
    ),
)
