"""gpt-oss (OpenAI 2025). Attention sinks, sliding windows in every other layer, and experts with biases.

The experts of a layer are two tensors whose matrices are transposed. Gate and up alternate in the first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megarl.models.architecture import Architecture, Experts
from megarl.models.config_reader import OF_CLASS, ConfigReader, read_windows
from megarl.models.experts import check_router_gradient
from megarl.models.family import Family
from megarl.models.mapping import (
    EXPERT,
    HF_LAYER,
    MEGATRON_LAYER,
    Cut,
    MappingRow,
    StagePlacement,
    TensorPart,
)
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk

_ALPHA = 1.702  # the slope of the sigmoid in Megatron's quick_gelu
_EXPERTS = HF_LAYER + "mlp.experts."


def _row(megatron: str, place: StagePlacement, cut: Cut, tensor: tuple[str, str] | TensorPart) -> MappingRow:
    return MappingRow(megatron=MEGATRON_LAYER + megatron, place=place, cut=cut, tensors=(tensor,))


def _read(reader: ConfigReader) -> Architecture:
    reader.require("attention_bias", True, "only true is supported")
    is_packed = _read_packing(reader)
    reader.take("initial_context_length")  # that of the scaling, which is read there
    reader.require("swiglu_alpha", _ALPHA, f"only {_ALPHA} is supported")

    architecture = read_trunk(
        reader,
        qkv_bias=True,
        read_experts=_read_experts,
        # Without `layer_types`, every other layer has a window, the first included.
        read_windows=partial(read_windows, full_every=2),
    )
    return replace(architecture, linear_bias=True, has_sinks=True, is_packed=is_packed)


def _read_packing(reader: ConfigReader) -> bool:
    """Return whether the experts are in MXFP4, which is converted to bfloat16 when it is read."""
    quantization = reader.take("quantization_config")
    if quantization is None:
        return False
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4":
        reader.refuse("quantization_config", "only null and quant_method mxfp4 are supported")
    return True


def _read_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    num_experts = reader.number("num_local_experts", int)
    older = reader.number("experts_per_token", int, None)
    num_experts_per_tok = reader.number("num_experts_per_tok", int, older or OF_CLASS)
    check_router_gradient(reader, num_experts_per_tok, norm_topk_prob=True)

    if older not in (None, num_experts_per_tok):
        reader.conflict(
            f"field 'experts_per_token' is {older}; 'num_experts_per_tok' is {num_experts_per_tok}; keep one",
            "experts_per_token",
            "num_experts_per_tok",
        )

    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=reader.number("intermediate_size", int),
        shared_intermediate_size=0,
        norm_topk_prob=True,
        layers=tuple(range(num_hidden_layers)),
        clamp=reader.number("swiglu_limit", float, OF_CLASS),
    )


# The windows of the example are shorter than the rows of the tests.
GPT_OSS = Family(
    model_type="gpt_oss",
    class_prefix="GptOss",
    read=_read,
    rows=(
        *(row for row in TRUNK_ROWS if ".mlp." not in row.megatron),
        _row(
            "self_attention.linear_proj.bias",
            StagePlacement.layer,
            Cut.replicated,
            (HF_LAYER + "self_attn.o_proj.bias", "H"),
        ),
        _row(
            "self_attention.core_attention.softmax_offset",
            StagePlacement.layer,
            Cut.column,
            (HF_LAYER + "self_attn.sinks", "N"),
        ),
        _row(
            "mlp.router.weight",
            StagePlacement.layer,
            Cut.replicated,
            (HF_LAYER + "mlp.router.weight", "E H"),
        ),
        _row("mlp.router.bias", StagePlacement.layer, Cut.replicated, (HF_LAYER + "mlp.router.bias", "E")),
        _row(
            EXPERT + "linear_fc1.weight",
            StagePlacement.expert,
            Cut.gated,
            TensorPart(name=_EXPERTS + "gate_up_proj", dims="E H (M 2)", order="2 M H"),
        ),
        _row(
            EXPERT + "linear_fc1.bias",
            StagePlacement.expert,
            Cut.gated,
            TensorPart(name=_EXPERTS + "gate_up_proj_bias", dims="E (M 2)", order="2 M"),
        ),
        _row(
            EXPERT + "linear_fc2.weight",
            StagePlacement.expert,
            Cut.row,
            TensorPart(name=_EXPERTS + "down_proj", dims="E M H", order="H M"),
        ),
        _row(
            EXPERT + "linear_fc2.bias",
            StagePlacement.expert,
            Cut.replicated,
            TensorPart(name=_EXPERTS + "down_proj_bias", dims="E H"),
        ),
    ),
    example_fields=EXAMPLE
    | {
        "head_dim": 32,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
        "rope_theta": 150000.0,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    models="gpt-oss-20b and 120b",
    limits=(
        "folders in MXFP4 are read; SGLang requires one in bfloat16, which `megarl convert` writes",
        "`engine.layers: local` only, `expert_tensor_parallel_size` 1",
        "SGLang on GPUs only, `rollout.expert_parallel_size` 1",
    ),
)
