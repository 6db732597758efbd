"""Qwen 2, 2.5 and 3, dense and MoE. Qwen 2 has biases on q, k and v; Qwen 3 has norms on q and k."""

from __future__ import annotations

from functools import partial

from megarl.models.architecture import Experts
from megarl.models.config_reader import OF_CLASS, ConfigReader
from megarl.models.experts import (
    SGLANG_DIFFERENCES,
    check_router_gradient,
    expert_rows,
    read_num_experts,
    shared_expert_rows,
)
from megarl.models.family import Family, SGLangStages
from megarl.models.mapping import HF_LAYER, MEGATRON_LAYER, Cut, MappingRow, StagePlacement, is_sparse
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk

SPARSE_ROWS = expert_rows("mlp", gate="gate_proj", up="up_proj", down="down_proj")
# A gate scales the output of the shared expert.
SHARED_EXPERT_ROWS = (
    *shared_expert_rows("mlp.shared_expert"),
    MappingRow(
        megatron=MEGATRON_LAYER + "mlp.shared_experts.gate_weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "mlp.shared_expert_gate.weight", "1 H"),),
        applies=is_sparse,
    ),
)


def read_experts_with_shared(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    """Read the experts of a model whose layers also have a shared expert with a gate."""
    reader.require("qkv_bias", True, "only true is supported")
    return read_experts(reader, num_hidden_layers, reader.number("shared_expert_intermediate_size", int))


def read_experts(reader: ConfigReader, num_hidden_layers: int, shared_intermediate_size: int = 0) -> Experts:
    """Read the experts of a model with a softmax router.

    Args:
        reader: The fields of the language model.
        shared_intermediate_size: The size of a shared expert with a gate; 0: there is none.
    """
    num_experts, num_experts_per_tok = read_num_experts(reader)
    norm_topk_prob = reader.flag("norm_topk_prob")
    check_router_gradient(reader, num_experts_per_tok, norm_topk_prob)

    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=reader.number("moe_intermediate_size", int),
        shared_intermediate_size=shared_intermediate_size,
        norm_topk_prob=norm_topk_prob,
        layers=_sparse_layers(reader, num_hidden_layers),
        has_shared_gate=shared_intermediate_size > 0,
    )


def _sparse_layers(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    """Return every `decoder_sparse_step`-th layer except those of `mlp_only_layers`, as transformers does."""
    step = reader.number("decoder_sparse_step", int, OF_CLASS)
    dense = reader.take("mlp_only_layers") or []

    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        reader.problems.append(f"field 'mlp_only_layers' is {dense!r}, but must be a list of layer numbers")
        return ()

    # The step counts layers from 1: with a step of 2, the second layer is the first sparse one.
    layers = tuple(layer for layer in range(step - 1, num_hidden_layers, step) if layer not in dense)

    if not layers:
        said = f"'decoder_sparse_step' {step} and 'mlp_only_layers' {dense}"
        reader.problems.append(f"{said} leave no layer with experts")

    return layers


EXPERTS_OF_EXAMPLE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


QWEN2 = Family(
    model_type="qwen2",
    class_prefix="Qwen2",
    read=partial(read_trunk, qkv_bias=True),
    rows=TRUNK_ROWS,
    example_fields=EXAMPLE,
    sglang_stages=SGLangStages.ties,
    models="Qwen2 and Qwen2.5",
)
QWEN3 = Family(
    model_type="qwen3",
    class_prefix="Qwen3",
    read=partial(read_trunk, qk_norm=True),
    rows=TRUNK_ROWS,
    example_fields=EXAMPLE | {"head_dim": 32},
    sglang_stages=SGLangStages.ties,
    models="Qwen3",
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    class_prefix="Qwen2Moe",
    read=partial(read_trunk, qkv_bias=True, read_experts=read_experts_with_shared),
    rows=(*TRUNK_ROWS, *SPARSE_ROWS, *SHARED_EXPERT_ROWS),
    example_fields=EXAMPLE
    | EXPERTS_OF_EXAMPLE
    | {"shared_expert_intermediate_size": 48, "mlp_only_layers": []},
    sglang_stages=SGLangStages.head_on_every,
    sglang_differences=SGLANG_DIFFERENCES,
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_prefix="Qwen3Moe",
    read=partial(read_trunk, qk_norm=True, read_experts=read_experts),
    rows=(*TRUNK_ROWS, *SPARSE_ROWS),
    example_fields=EXAMPLE | EXPERTS_OF_EXAMPLE | {"head_dim": 32, "norm_topk_prob": True},
    sglang_stages=SGLangStages.head_on_every,
    sglang_differences=SGLANG_DIFFERENCES,
    models="Qwen3-30B-A3B, Qwen3-235B-A22B and their later versions",
)
