"""Qwen 2 to 3.6, dense and MoE. Qwen 2 has biases on q, k and v; Qwen 3 has norms on q and k.

Qwen3-Next, and Qwen3.5 and 3.6 with its layers, have gated delta nets, and attention in every fourth layer.
Qwen3.5 and 3.6 are dense or have experts, and have separate projections of gated delta nets. Published
folders have a vision tower, and the fields of the language model in a nested object. megarl trains the
language model. It reads no images with it, and keeps the tower as it is. Folders of the language model alone
have its fields at the top level.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.models.architecture import Architecture, BlockNorms, Experts
from megarl.models.config_reader import OF_CLASS, ConfigReader
from megarl.models.delta_net import (
    GATED_ATTENTION_ROWS,
    MTP,
    PACKED_INPUT,
    SEPARATE_INPUT,
    delta_net_rows,
    has_irregular_layers,
    read_delta_net,
    read_no_windows,
    sglang_derived,
)
from megarl.models.experts import (
    SGLANG_DIFFERENCES,
    check_router_gradient,
    expert_rows,
    fused_first,
    read_num_experts,
    read_softmax_experts,
    shared_expert_rows,
)
from megarl.models.family import Family, SGLangStages
from megarl.models.mapping import HF_LAYER, MEGATRON_LAYER, Cut, MappingRow, StagePlacement, is_sparse
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk, trunk_rows, with_prefix

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
    sglang_groups=True,
    class_prefix="Qwen3Moe",
    read=partial(read_trunk, qk_norm=True, read_experts=read_experts),
    rows=(*TRUNK_ROWS, *SPARSE_ROWS),
    example_fields=EXAMPLE | EXPERTS_OF_EXAMPLE | {"head_dim": 32, "norm_topk_prob": True},
    sglang_stages=SGLangStages.head_on_every,
    sglang_differences=SGLANG_DIFFERENCES,
    models="Qwen3-30B-A3B, Qwen3-235B-A22B and their later versions",
)


# Fields that transformers does not read, with the values that it implies.
_IMPLIED: dict[str, object] = {
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_TOKENS_OF_IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def read_sections(
    text: dict[str, Any], default: tuple[int, ...], reader: ConfigReader, *, is_interleaved: bool
) -> tuple[int, ...]:
    """Take the sections of the three position axes out of the object of the rotary embedding.

    What remains in the object is an ordinary rotary embedding.
    """
    sizes: Any = default
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name)
        if not isinstance(rope, dict):
            continue

        rest = dict(rope)
        sizes = rest.pop("mrope_section", sizes)
        interleaved = rest.pop("mrope_interleaved", is_interleaved)
        if interleaved is not is_interleaved:
            said = f"only {is_interleaved} is supported by this family"
            reader.problems.append(f"field 'mrope_interleaved' is {interleaved!r}; {said}")

        # The type of an ordinary embedding has several names.
        for kind in ("type", "rope_type"):
            if rest.get(kind) == "mrope":
                rest[kind] = "default"
        text[name] = rest

    if not (isinstance(sizes, list | tuple) and len(sizes) == 3 and all(isinstance(n, int) for n in sizes)):
        reader.problems.append(f"field 'mrope_section' is {sizes!r}, but must be a list of three integers")
        return default
    return tuple(sizes)


def _read_next(
    reader: ConfigReader, read_experts: Callable[[ConfigReader, int], Experts] | None = None
) -> Architecture:
    """Read a model with the layers of Qwen3-Next."""
    architecture = read_trunk(reader, qk_norm=True, read_experts=read_experts, read_windows=read_no_windows)
    return replace(
        architecture,
        delta_net=read_delta_net(reader, architecture.num_hidden_layers),
        has_output_gate=True,
        norms=BlockNorms(zero_centered=True),
    )


def _read_text(
    reader: ConfigReader, read_experts: Callable[[ConfigReader, int], Experts] | None = None
) -> Architecture:
    """Read the fields of the language model of Qwen3.5."""
    # The three positions of a token of text are equal, so each section rotates by the same one.
    fields = dict(reader.fields)
    read_sections(fields, (11, 11, 10), reader, is_interleaved=True)
    text = replace(reader, fields=fields)

    for name, value in _IMPLIED.items():
        text.require(name, value, f"only {json.dumps(value)} is supported")
    text.take("mamba_ssm_dtype")  # of the states that an engine stores
    text.count("mtp_num_hidden_layers", 0)
    text.flag("mtp_use_dedicated_embeddings")

    return _read_next(text, read_experts)


def _read_with_tower(reader: ConfigReader, text: Family) -> Architecture:
    """Read a folder with a vision tower, whose sizes do not matter."""
    model_type = reader.take("model_type")
    for name in (*_TOKENS_OF_IMAGES, "mtp_num_hidden_layers"):
        reader.count(name, 0)
    reader.flag("language_model_only")  # whether the folder lacks the tower
    reader.object("vision_config")

    is_tied = reader.flag("tie_word_embeddings")
    nested = reader.nested("text_config", {**reader.object("text_config"), "tie_word_embeddings": is_tied})
    architecture = text.read(nested)
    reader.check_nested("text_config", nested)
    return replace(architecture, model_type=model_type)


def _sglang_replaced(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang's own class of the configuration reads the names of transformers v4 only."""
    rope = fields.get("rope_parameters")
    if not rope:
        return {}
    outer = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return outer | {"rope_scaling": None if rope.get("rope_type", "default") == "default" else rope}


def _sglang_text_only(config: Mapping[str, Any], text: Family) -> Mapping[str, Any]:
    """Return the fields with which SGLang creates the language model without its tower."""
    architecture = text.read(text.reader(config["text_config"]))
    return {"language_model_only": True, "text_config": sglang_derived(architecture)}


# Both kinds of layers are on each of two pipeline stages.
_TEXT_EXAMPLE = {
    name: value for name, value in EXAMPLE.items() if name not in ("rope_theta", "intermediate_size")
} | {
    "head_dim": 32,
    "attn_output_gate": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "mtp_num_hidden_layers": 0,
}
_SGLANG_DIFFERENCES = {
    **SGLANG_DIFFERENCES,
    "attention in other layers than every n-th one": has_irregular_layers,
}
_LIMITS = (
    "layers that predict further tokens are not trained, but [kept](large_models.md#multi-token-prediction)",
    "SGLang on GPUs only",
    "each response that shares a prompt computes the states of the prompt again",
)


def _family_with_tower(text: Family, models: str) -> Family:
    """Return the family of published folders, of which `text` is the language model."""
    model_type = text.model_type.removesuffix("_text")
    return Family(
        model_type=model_type,
        class_prefix=text.class_prefix,
        lm_class="ForConditionalGeneration",
        read=partial(_read_with_tower, text=text),
        rows=with_prefix(text.rows, "model.", "model.language_model."),
        example_fields={
            "tie_word_embeddings": False,
            **{name: 190 + number for number, name in enumerate(_TOKENS_OF_IMAGES)},
            "text_config": {
                name: value
                for name, value in text.example().items()
                if name not in ("architectures", "tie_word_embeddings")
            },
            "vision_config": {
                "model_type": f"{model_type}_vision",
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 64,
                "patch_size": 2,
                "num_position_embeddings": 4,
            },
        },
        kept=MTP | {"model.visual.": "the vision tower"},
        sglang_replaced=partial(_sglang_text_only, text=text),
        sglang_differences=_SGLANG_DIFFERENCES,
        models=models,
        limits=("images are refused; the vision tower is [kept](data.md#towers-that-are-kept)", *_LIMITS),
    )


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    class_prefix="Qwen3Next",
    read=partial(_read_next, read_experts=read_experts_with_shared),
    rows=(
        *trunk_rows((*GATED_ATTENTION_ROWS, *delta_net_rows(PACKED_INPUT))),
        *SPARSE_ROWS,
        *SHARED_EXPERT_ROWS,
    ),
    # Both kinds of layers are on each of two pipeline stages.
    example_fields=EXAMPLE
    | {
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
    },
    kept=MTP,
    sglang_derived=sglang_derived,
    sglang_replaced=_sglang_replaced,
    sglang_differences=_SGLANG_DIFFERENCES,
    models="Qwen3-Next-80B-A3B",
    limits=_LIMITS,
)
QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    class_prefix="Qwen3_5",
    read=_read_text,
    rows=trunk_rows((*GATED_ATTENTION_ROWS, *delta_net_rows(SEPARATE_INPUT))),
    example_fields=_TEXT_EXAMPLE | {"intermediate_size": 96},
    kept=MTP,
    sglang_derived=sglang_derived,
    sglang_differences=_SGLANG_DIFFERENCES,
    models="the language models of `qwen3_5` alone",
    limits=_LIMITS,
)
QWEN3_5_MOE_TEXT = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5_moe_text",
    class_prefix="Qwen3_5Moe",
    read=partial(
        _read_text,
        read_experts=partial(read_softmax_experts, shared_size_field="shared_expert_intermediate_size"),
    ),
    rows=(*QWEN3_5_TEXT.rows, *fused_first(SPARSE_ROWS), *SHARED_EXPERT_ROWS),
    example_fields=_TEXT_EXAMPLE | EXPERTS_OF_EXAMPLE | {"shared_expert_intermediate_size": 48},
    models="the language models of `qwen3_5_moe` alone",
)
QWEN3_5 = _family_with_tower(QWEN3_5_TEXT, models="Qwen3.5 and Qwen3.6, dense")
QWEN3_5_MOE = _family_with_tower(
    QWEN3_5_MOE_TEXT, models="Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B, Qwen3.6-35B-A3B"
)
