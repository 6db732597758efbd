"""Tiny models of the registered families, made from each family's example.

Tests that hold for every family take their cases from here, so that registering a family is enough to test
it.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.families import FAMILIES


def example_fields(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a family's example with changes, ignoring fields that the example lacks."""
    example = FAMILIES[model_type].example()
    fields = _changed(example, changes)

    # A model of images has its language model in a nested object.
    if "text_config" in example:
        text = _changed(example["text_config"], changes)
        fields["text_config"] = text
        fields["vision_config"] = example["vision_config"] | {"out_hidden_size": text["hidden_size"]}
        num_frequencies = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 2
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


def example_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration that transformers creates from `example_fields`."""
    return AutoConfig.for_model(**example_fields(model_type, **changes))


def example_architecture(model_type: str, **changes: Any) -> Architecture:
    """Return the architecture that the family reads from `example_fields`."""
    reader = ConfigReader(example_fields(model_type, **changes))
    architecture = FAMILIES[model_type].read(reader)
    assert reader.problems == []
    return architecture


def has_experts(model_type: str) -> bool:
    return example_architecture(model_type).experts is not None


DENSE_FAMILIES = tuple(name for name in FAMILIES if not has_experts(name))
SPARSE_FAMILIES = tuple(name for name in FAMILIES if has_experts(name))
