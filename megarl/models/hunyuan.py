"""Hy3 (Tencent 2026): norms of queries and keys, and experts as in DeepSeek-V3 under names of its own."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.architecture import Architecture, Experts, RouterScore
from megarl.models.config_reader import OF_CLASS, ConfigReader
from megarl.models.experts import (
    SELECTION_BIAS_ROW,
    check_feed_forwards,
    check_router_gradient,
    expert_rows,
    layers_after_dense,
    num_dense_layers,
    read_num_experts,
    shared_expert_rows,
    with_one_dense_layer,
)
from megarl.models.family import Family
from megarl.models.mapping import HF_LAYER
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk

# Fields of the published model code that select variants. This family computes these.
_FIXED = dict.fromkeys(
    ("moe_router_enable_expert_bias", "moe_router_use_sigmoid", "qk_norm", "route_norm"), True
)
# These fields concern rounding, kernels and the id of a token.
_HARMLESS = (
    "enable_attention_fp32_softmax",
    "enable_lm_head_fp32",
    "enable_moe_fp32_combine",
    "eod_token_id",
    "use_grouped_mm",
)
_ROUTER, *_EXPERTS = expert_rows("mlp", gate="gate_proj", up="up_proj", down="down_proj")


def _read(reader: ConfigReader) -> Architecture:
    for name, supported in _FIXED.items():
        reader.require(name, supported, f"only {supported!r} is supported")
    for name in _HARMLESS:
        reader.take(name)

    architecture = read_trunk(
        with_one_dense_layer(reader), qk_norm=True, read_experts=_read_experts, may_have_mtp=True
    )
    check_feed_forwards(reader, architecture, has_one_dense=True)
    return architecture


def _read_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    num_experts, chosen = read_num_experts(reader)
    check_router_gradient(reader, chosen, norm_topk_prob=True)
    size = reader.number("moe_intermediate_size", int)
    reader.require("expert_hidden_dim", size, "must be 'moe_intermediate_size'")

    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=size,
        shared_intermediate_size=reader.count("num_shared_experts", OF_CLASS) * size,
        norm_topk_prob=True,
        layers=layers_after_dense(reader, num_hidden_layers),
        score=RouterScore.sigmoid,
        has_selection_bias=True,
        scaling_factor=reader.number("router_scaling_factor", float, OF_CLASS),
    )


# Experts would hardly matter with the small weights that transformers' class starts from.
HY_V3 = Family(
    model_type="hy_v3",
    class_prefix="HYV3",
    read=_read,
    rows=(
        *TRUNK_ROWS,
        replace(_ROUTER, tensors=((HF_LAYER + "mlp.router.gate.weight", "E H"),)),
        *_EXPERTS,
        replace(SELECTION_BIAS_ROW, tensors=((HF_LAYER + "mlp.expert_bias", "E"),)),
        *shared_expert_rows("mlp.shared_mlp"),
    ),
    example_fields=EXAMPLE
    | {
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "num_experts": 8,
        "num_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "router_scaling_factor": 2.8,
        "num_nextn_predict_layers": 1,
    },
    sglang_fields=_FIXED,
    sglang_derived=num_dense_layers,
    sglang_differences={
        "a RoPE scaling": lambda architecture: architecture.rope_scaling is not None,
    },
    models="Hy3",
    limits=(
        "layers that predict further tokens are not trained, but "
        "[kept](large_models.md#multi-token-prediction)",
    ),
)
