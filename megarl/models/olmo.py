"""OLMo 2 and 3 (AI2 2025): norms of each block's output, and of the queries and keys of all heads together.

OLMo 3 has sliding windows in three of four layers. Its context is extended by YaRN in the others only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, BlockNorms, QKNorm
from megarl.models.config_reader import ConfigReader
from megarl.models.family import Family
from megarl.models.trunk import (
    ATTENTION_ROWS_WITH_NORMS_OVER_HEADS,
    EXAMPLE,
    NormNames,
    read_trunk,
    trunk_rows,
)
from megarl.models.windows import read_windows

_ROWS = trunk_rows(
    ATTENTION_ROWS_WITH_NORMS_OVER_HEADS,
    NormNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_feed_forward=None,
        after_feed_forward="post_feedforward_layernorm",
    ),
)
_OLMO3_THETA = 500000.0


def _with_norms(architecture: Architecture) -> Architecture:
    return replace(architecture, norms=BlockNorms(before=False, after=True), qk_norm_kind=QKNorm.all_heads)


def _read_olmo2(reader: ConfigReader) -> Architecture:
    return _with_norms(read_trunk(reader, qk_norm=True))


def _read_olmo3(reader: ConfigReader) -> Architecture:
    architecture = read_trunk(reader, qk_norm=True, read_windows=_read_windows)
    # transformers gives the field of v4 to layers with full attention only.
    theta = reader.fields.get("rope_theta")
    if theta not in (None, _OLMO3_THETA) and not isinstance(reader.fields.get("rope_parameters"), dict):
        reader.conflict(
            f"field 'rope_theta' is {theta!r}; transformers would use it in layers with full attention and "
            f"{_OLMO3_THETA:g} in the others; give both in 'rope_parameters'",
            "rope_theta",
        )
    return _with_norms(architecture)


def _read_windows(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    return read_windows(reader, num_hidden_layers, full_every=4)


def _sglang_differs(architecture: Architecture) -> Iterator[str]:
    """SGLang has one class for both families."""
    if architecture.head_dim * architecture.num_attention_heads != architecture.hidden_size:
        yield "a head size other than hidden_size / num_attention_heads"
    local = architecture.local_rope
    if local is not None and (local.theta, local.scaling) != (architecture.rope_theta, None):
        yield "another base frequency or a RoPE scaling in layers with a window"


def _sglang_replaced(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang has one object for all layers, and leaves out its scaling in layers with a window."""
    rope = fields.get("rope_parameters") or {}
    return {"rope_parameters": rope["full_attention"]} if "full_attention" in rope else {}


def _olmo2_example() -> dict[str, Any]:
    return EXAMPLE | {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "rope_theta": 500000.0,
    }


def _olmo3_example() -> dict[str, Any]:
    """Return a model whose windows are shorter than the rows of the tests, as is the original context."""
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
    }
    return EXAMPLE | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_theta": _OLMO3_THETA,
        "rope_scaling": scaling,
        "sliding_window": 4,
    }


OLMO2 = Family(
    model_type="olmo2",
    class_prefix="Olmo2",
    read=_read_olmo2,
    rows=_ROWS,
    example=_olmo2_example,
    sglang_differs=_sglang_differs,
    models="OLMo 2",
)
OLMO3 = Family(
    model_type="olmo3",
    class_prefix="Olmo3",
    read=_read_olmo3,
    rows=_ROWS,
    example=_olmo3_example,
    sglang_fields={"rope_theta": _OLMO3_THETA},  # SGLang's own class has another default
    sglang_replaced=_sglang_replaced,
    sglang_differs=_sglang_differs,
    models="OLMo 3",
)
