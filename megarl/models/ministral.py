"""Models of transformers' Ministral class: Mistral's layers, with a sliding window in some or all of them."""

from __future__ import annotations

from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.family import Family
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk
from megarl.models.windows import check_sliding_window, read_windows


def _read(reader: ConfigReader) -> Architecture:
    return read_trunk(reader, read_windows=_read_windows)


def _read_windows(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    # Null means full attention.
    if reader.value("sliding_window") is None:
        check_sliding_window(reader, num_hidden_layers, 0, has_experts=False)
        return ()
    return read_windows(reader, num_hidden_layers, full_every=None)


def _example() -> dict[str, Any]:
    """Return a model whose windows are shorter than the rows of the tests."""
    return EXAMPLE | {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "head_dim": 32,
        "sliding_window": 4,
    }


MINISTRAL = Family(
    model_type="ministral",
    class_prefix="Ministral",
    read=_read,
    rows=TRUNK_ROWS,
    example=_example,
    sglang_class=False,
    models="models of the class `MinistralForCausalLM`, with sliding windows",
)
