"""Tiny models of the registered families, made from each family's example.

Tests that hold for every family take their cases from here, so that registering a family is enough to test
it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)

from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.mapping import StagePlacement, TensorPart


def example_fields(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a family's example with changes, ignoring fields that the example lacks."""
    example = FAMILIES[model_type].example()
    fields = _changed(example, changes)

    # A model of images has its language model in a nested object.
    if "text_config" in example:
        text = _changed(example["text_config"], changes)
        fields["text_config"] = text
        fields["vision_config"] = example["vision_config"] | {"out_hidden_size": text["hidden_size"]}
        head_dim = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
        num_frequencies = int(head_dim * text["rope_parameters"].get("partial_rotary_factor", 1)) // 2
        third = num_frequencies // 3
        sections = {"mrope_section": [num_frequencies - 2 * third, third, third]}
        text["rope_parameters"] = text["rope_parameters"] | sections

    # With latent attention, every head has its own keys and values.
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return fields


def _changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return fields | {name: value for name, value in changes.items() if name in fields}


def model_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that creates the language model, with a vision tower if it has one."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def new_model(config: PretrainedConfig) -> Any:
    """Create a float32 model. A vision tower that megarl does not train has no parameters."""
    model = model_class(config).from_config(config, dtype=torch.float32)
    family = FAMILIES.get(config.model_type)
    if hasattr(config, "vision_config") and family is not None and family.tower_rows is None:
        model.model.visual = torch.nn.Module()
    return model


def is_kept(name: str, config: PretrainedConfig) -> bool:
    """Return whether a parameter belongs to what megarl keeps without training it."""
    return FAMILIES[config.model_type].keeps(name)


def has_fused_experts(model_type: str) -> bool:
    """Return whether published folders of a family have the experts of a layer in one tensor."""
    return any(
        row.place is StagePlacement.expert and isinstance(row.tensors[0], TensorPart)
        for row in FAMILIES[model_type].rows
    )


# Families whose published folders have transposed experts. transformers writes them as it has them in memory.
WITH_TRANSPOSED_EXPERTS = ("qwen3_vl_moe",)


def example_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration that transformers creates from `example_fields`."""
    assert model_type in CONFIG_MAPPING, (
        f"the installed transformers has no model_type {model_type!r}, and its class is the reference of the tests"
    )
    return AutoConfig.for_model(**example_fields(model_type, **changes))


def example_architecture(model_type: str, **changes: Any) -> Architecture:
    """Return the architecture that the family reads from `example_fields`."""
    reader = FAMILIES[model_type].reader(example_fields(model_type, **changes))
    architecture = FAMILIES[model_type].read(reader)
    assert reader.problems == []
    return architecture


def has_experts(model_type: str) -> bool:
    return example_architecture(model_type).experts is not None


DENSE_FAMILIES = tuple(name for name in FAMILIES if not has_experts(name))
SPARSE_FAMILIES = tuple(name for name in FAMILIES if has_experts(name))
# Families with the parameters of another one under other names, which need fewer tests.
RENAMED_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text")
# Families whose classes of transformers do not tie the output layer to the embedding.
UNTIED_FAMILIES = ("nemotron_h",)
