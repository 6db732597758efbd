"""Llama 2 and 3, and other models published as `LlamaForCausalLM`."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.family import Family, SGLangStages
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk


def _read(reader: ConfigReader) -> Architecture:
    return read_trunk(reader)


def _example() -> dict[str, Any]:
    """Return a tiny Llama 3.1 with scaled long wavelengths."""
    rope_scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return EXAMPLE | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": rope_scaling,
    }


LLAMA = Family(
    model_type="llama",
    class_prefix="Llama",
    read=_read,
    rows=TRUNK_ROWS,
    example=_example,
    sglang_stages=SGLangStages(head_on_every=True),
    models="Llama 2 and 3.0 to 3.3, and other models published as `LlamaForCausalLM`",
)
