"""Qwen3.5 and 3.6, dense and MoE: the layers of Qwen3-Next with separate projections of gated delta nets.

Published folders have a vision tower, and the fields of the language model in a nested object. megarl trains
the language model. It reads no images with it, and keeps the tower as it is. Folders of the language model
alone have its fields at the top level.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.models.architecture import Architecture, BlockNorms, Experts
from megarl.models.config_reader import ConfigReader
from megarl.models.delta_net import (
    GATED_ATTENTION_ROWS,
    MTP,
    SEPARATE_INPUT,
    delta_net_rows,
    read_delta_net,
    read_no_windows,
    sglang_derived,
    sglang_layers_differ,
)
from megarl.models.experts import check_router_gradient, fused_first, read_num_experts
from megarl.models.experts import sglang_differs as sglang_experts_differ
from megarl.models.family import Family
from megarl.models.mapping import MappingRow
from megarl.models.qwen import SHARED_EXPERT_ROWS, SPARSE_ROWS
from megarl.models.qwen_vl import Sections, read_sections
from megarl.models.trunk import EXAMPLE, read_trunk, trunk_rows, with_prefix

# Fields that transformers does not read, with the values that it implies.
_IMPLIED: dict[str, tuple[object, ...]] = {
    "attn_output_gate": (True, None),
    "output_gate_type": ("swish", None),
    "norm_topk_prob": (True, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
}
_TOKENS_OF_IMAGES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_TOWER = {"model.visual.": "the vision tower"}


def _read_text(
    reader: ConfigReader, read_experts: Callable[[ConfigReader, int], Experts] | None = None
) -> Architecture:
    """Read the fields of the language model."""
    # The three positions of a token of text are equal, so each section rotates by the same one.
    fields = dict(reader.fields)
    read_sections(fields, Sections((11, 11, 10), is_interleaved=True), reader)
    text = replace(reader, fields=fields)

    for name, accepted in _IMPLIED.items():
        if text.take(name) not in accepted:
            text.refuse(name, f"only {json.dumps(accepted[0])} is supported")
    text.take("mamba_ssm_dtype")  # of the states that an engine stores
    text.count("mtp_num_hidden_layers", 0)
    text.flag("mtp_use_dedicated_embeddings")

    architecture = read_trunk(
        text,
        qk_norm=True,
        read_experts=read_experts,
        read_windows=read_no_windows,
    )
    return replace(
        architecture,
        delta_net=read_delta_net(text, architecture.num_hidden_layers),
        has_output_gate=True,
        norms=BlockNorms(zero_centered=True),
    )


def _read_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    num_experts, num_experts_per_tok = read_num_experts(reader)
    check_router_gradient(reader, num_experts_per_tok, norm_topk_prob=True)
    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=reader.number("moe_intermediate_size", int),
        shared_intermediate_size=reader.number("shared_expert_intermediate_size", int),
        norm_topk_prob=True,
        layers=tuple(range(num_hidden_layers)),
        has_shared_gate=True,
    )


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


def _sglang_differs(architecture: Architecture) -> Iterator[str]:
    yield from sglang_experts_differ(architecture)
    yield from sglang_layers_differ(architecture)


def _sglang_text_only(config: Mapping[str, Any], text: Family) -> Mapping[str, Any]:
    """Return the fields with which SGLang creates the language model without its tower."""
    architecture = text.read(text.reader(config["text_config"]))
    return {"language_model_only": True, "text_config": sglang_derived(architecture)}


def _text_example(model_type: str, class_prefix: str, feed_forward: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model with both kinds of layers on each of two pipeline stages."""
    trunk = {
        name: value for name, value in EXAMPLE.items() if name not in ("rope_theta", "intermediate_size")
    }
    return trunk | {
        "architectures": [f"{class_prefix}ForCausalLM"],
        "model_type": model_type,
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
        **feed_forward,
    }


def _example_with_tower(model_type: str, class_prefix: str, text: Family) -> dict[str, Any]:
    top = {
        "architectures": [f"{class_prefix}ForConditionalGeneration"],
        "model_type": model_type,
        "tie_word_embeddings": False,
    }
    return {
        **top,
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
    }


_LIMITS = (
    "layers that predict further tokens are not trained, but [kept](moe.md#multi-token-prediction)",
    "SGLang on GPUs only",
    "each response that shares a prompt computes the states of the prompt again",
)


def _text_family(
    model_type: str,
    class_prefix: str,
    read: Callable[[ConfigReader], Architecture],
    expert_rows: tuple[MappingRow, ...],
    feed_forward: Mapping[str, Any],
) -> Family:
    """Return the family of the language model alone.

    Args:
        model_type: The field of `config.json`.
        feed_forward: The fields of the example that concern feed-forwards.
    """
    return Family(
        model_type=model_type,
        class_prefix=class_prefix,
        read=read,
        rows=(*trunk_rows((*GATED_ATTENTION_ROWS, *delta_net_rows(SEPARATE_INPUT))), *expert_rows),
        example=partial(_text_example, model_type, class_prefix, feed_forward),
        kept=MTP,
        sglang_derived=sglang_derived,
        sglang_differs=_sglang_differs,
        models=f"the language models of `{model_type.removesuffix('_text')}` alone",
        limits=_LIMITS,
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
        example=partial(_example_with_tower, model_type, text.class_prefix, text),
        kept=MTP | _TOWER,
        sglang_replaced=partial(_sglang_text_only, text=text),
        sglang_differs=_sglang_differs,
        models=models,
        limits=("images are refused; the vision tower is [kept](images.md#towers-that-are-kept)", *_LIMITS),
    )


QWEN3_5_TEXT = _text_family("qwen3_5_text", "Qwen3_5", _read_text, (), {"intermediate_size": 96})
QWEN3_5_MOE_TEXT = _text_family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    partial(_read_text, read_experts=_read_experts),
    (*fused_first(SPARSE_ROWS), *SHARED_EXPERT_ROWS),
    {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
)
QWEN3_5 = _family_with_tower(QWEN3_5_TEXT, models="Qwen3.5 and Qwen3.6, dense")
QWEN3_5_MOE = _family_with_tower(
    QWEN3_5_MOE_TEXT, models="Qwen3.5-35B-A3B, 122B-A10B and 397B-A17B, Qwen3.6-35B-A3B"
)
