"""Mistral's dense models with full attention: 7B from v0.2 on, Nemo, Small, Large 2, and Ministral 8B.

They are Llama's layers under other names. Mistral 7B v0.1 has a sliding window, which is refused.
"""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.family import Family, SGLangStages
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk


def _read(reader: ConfigReader) -> Architecture:
    return read_trunk(reader)


def _example() -> dict[str, Any]:
    """Return a tiny Mistral Nemo, whose heads together are wider than the hidden size."""
    return EXAMPLE | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 32,
        "sliding_window": None,
    }


MISTRAL = Family(
    model_type="mistral",
    class_prefix="Mistral",
    read=_read,
    rows=TRUNK_ROWS,
    example=_example,
    sglang_stages=SGLangStages(head_on_every=True),
    models="Mistral 7B from v0.2 on, Nemo, Small, Large 2, Ministral 8B",
)
