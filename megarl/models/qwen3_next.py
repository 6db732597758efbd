"""Qwen3-Next: gated delta nets, attention with an output gate in every fourth layer, and small experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, BlockNorms
from megarl.models.config_reader import ConfigReader
from megarl.models.delta_net import (
    GATED_ATTENTION_ROWS,
    MTP,
    PACKED_INPUT,
    delta_net_rows,
    read_delta_net,
    read_no_windows,
    sglang_derived,
    sglang_layers_differ,
)
from megarl.models.experts import sglang_differs as sglang_experts_differ
from megarl.models.family import Family
from megarl.models.qwen import SHARED_EXPERT_ROWS, SPARSE_ROWS, read_experts_with_shared
from megarl.models.trunk import EXAMPLE, read_trunk, trunk_rows

_MODEL_TYPE = "qwen3_next"


def _read(reader: ConfigReader) -> Architecture:
    architecture = read_trunk(
        reader,
        qk_norm=True,
        read_experts=read_experts_with_shared,
        read_windows=read_no_windows,
    )
    return replace(
        architecture,
        delta_net=read_delta_net(reader, architecture.num_hidden_layers),
        has_output_gate=True,
        norms=BlockNorms(zero_centered=True),
    )


def _sglang_differs(architecture: Architecture) -> Iterator[str]:
    yield from sglang_experts_differ(architecture)
    yield from sglang_layers_differ(architecture)


def _sglang_replaced(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang's own class of the configuration reads the names of transformers v4 only."""
    rope = fields.get("rope_parameters")
    if not rope:
        return {}
    outer = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return outer | {"rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}


def _example() -> dict[str, Any]:
    """Return a model with both kinds of layers on each of two pipeline stages."""
    return EXAMPLE | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": _MODEL_TYPE,
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }


QWEN3_NEXT = Family(
    model_type=_MODEL_TYPE,
    class_prefix="Qwen3Next",
    read=_read,
    rows=(
        *trunk_rows((*GATED_ATTENTION_ROWS, *delta_net_rows(PACKED_INPUT))),
        *SPARSE_ROWS,
        *SHARED_EXPERT_ROWS,
    ),
    example=_example,
    kept=MTP,
    sglang_derived=sglang_derived,
    sglang_replaced=_sglang_replaced,
    sglang_differs=_sglang_differs,
    models="Qwen3-Next-80B-A3B",
    limits=(
        "layers that predict further tokens are not trained, but [kept](moe.md#multi-token-prediction)",
        "SGLang on GPUs only",
        "each response that shares a prompt computes the states of the prompt again",
    ),
)
