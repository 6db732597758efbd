"""Mixtral. Every layer has experts, and no layer has a dense feed-forward."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture, Experts
from megarl.models.config_reader import ConfigReader
from megarl.models.experts import check_router_gradient, expert_rows, read_num_experts, sglang_differs
from megarl.models.family import Family, SGLangStages
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk


def _read(reader: ConfigReader) -> Architecture:
    return read_trunk(reader, read_experts=_read_experts)


def _read_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    num_experts, num_experts_per_tok = read_num_experts(reader)
    check_router_gradient(reader, num_experts_per_tok, norm_topk_prob=True)
    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=reader.number("intermediate_size", int),
        shared_intermediate_size=0,
        norm_topk_prob=True,
        layers=tuple(range(num_hidden_layers)),
    )


def _example() -> dict[str, Any]:
    return EXAMPLE | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }


MIXTRAL = Family(
    model_type="mixtral",
    class_prefix="Mixtral",
    read=_read,
    rows=(*TRUNK_ROWS, *expert_rows("block_sparse_moe", gate="w1", up="w3", down="w2")),
    example=_example,
    sglang_stages=SGLangStages(head_on_every=True),
    sglang_differs=sglang_differs,
    models="Mixtral 8x7B and 8x22B",
)
