"""Tiny models of the registered families, made from each family's example.

Tests that hold for every family take their cases from here, so that registering a family is enough to test
it.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.families import FAMILIES


def example_fields(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a family's example with changes, ignoring fields that the example lacks."""
    example = FAMILIES[model_type].example()
    fields = example | {name: value for name, value in changes.items() if name in example}

    # With latent attention, every head has its own keys and values.
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    return fields


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
