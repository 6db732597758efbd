"""OLMo 2 and 3 (AI2 2025): norms of each block's output, and of the queries and keys of all heads together.

OLMo 3 has sliding windows in three of four layers. Its context is extended by YaRN in the others only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.models.architecture import Architecture, BlockNorms, QKNorm
from megarl.models.config_reader import ConfigReader, read_windows
from megarl.models.family import Family
from megarl.models.trunk import (
    ATTENTION_ROWS_WITH_NORMS_OVER_HEADS,
    EXAMPLE,
    read_trunk,
    trunk_rows,
)

_ROWS = trunk_rows(
    ATTENTION_ROWS_WITH_NORMS_OVER_HEADS,
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)
_OLMO3_THETA = 500000.0


def _with_norms(architecture: Architecture) -> Architecture:
    return replace(architecture, norms=BlockNorms(before=False, after=True), qk_norm_kind=QKNorm.all_heads)


def _read_olmo3(reader: ConfigReader) -> Architecture:
    architecture = read_trunk(reader, qk_norm=True, read_windows=partial(read_windows, full_every=4))
    # transformers gives the field of v4 to layers with full attention only.
    theta = reader.fields.get("rope_theta")
    if theta not in (None, _OLMO3_THETA) and not isinstance(reader.fields.get("rope_parameters"), dict):
        reader.conflict(
            f"field 'rope_theta' is {theta!r}; transformers would use it in layers with full attention and "
            f"{_OLMO3_THETA:g} in the others; give both in 'rope_parameters'",
            "rope_theta",
        )
    return _with_norms(architecture)


# SGLang has one class for both families.
_SGLANG_DIFFERENCES = {
    "a head size other than hidden_size / num_attention_heads": lambda architecture: (
        architecture.head_dim * architecture.num_attention_heads != architecture.hidden_size
    ),
    "another base frequency or a RoPE scaling in layers with a window": lambda architecture: (
        architecture.local_rope not in (None, (architecture.rope_theta, None))
    ),
}


def _sglang_replaced(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang has one object for all layers, and leaves out its scaling in layers with a window."""
    rope = fields.get("rope_parameters") or {}
    return {"rope_parameters": rope["full_attention"]} if "full_attention" in rope else {}


OLMO2 = Family(
    model_type="olmo2",
    class_prefix="Olmo2",
    read=lambda reader: _with_norms(read_trunk(reader, qk_norm=True)),
    rows=_ROWS,
    example_fields=EXAMPLE | {"rope_theta": 500000.0},
    sglang_differences=_SGLANG_DIFFERENCES,
    models="OLMo 2",
)
OLMO3 = Family(
    model_type="olmo3",
    class_prefix="Olmo3",
    read=_read_olmo3,
    rows=_ROWS,
    # The windows, and the original context, are shorter than the rows of the tests.
    example_fields=EXAMPLE
    | {
        "rope_theta": _OLMO3_THETA,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
        "sliding_window": 4,
    },
    sglang_fields={"rope_theta": _OLMO3_THETA},  # SGLang's own class has another default
    sglang_replaced=_sglang_replaced,
    sglang_differences=_SGLANG_DIFFERENCES,
    models="OLMo 3",
)
