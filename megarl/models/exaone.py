"""EXAONE 4.0 (LG AI Research 2025): norms of each block's output, and of the queries and keys of each head.

Three of four layers of the larger model have a sliding window, and the others do not rotate queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, BlockNorms
from megarl.models.config_reader import ConfigReader, check_sliding_window, read_windows
from megarl.models.family import Family
from megarl.models.trunk import ATTENTION_ROWS, EXAMPLE, read_trunk, trunk_rows


def _read(reader: ConfigReader) -> Architecture:
    architecture = read_trunk(reader, qk_norm=True, read_windows=_read_windows)
    windows = architecture.windows
    return replace(
        architecture,
        norms=BlockNorms(before=False, after=True),
        layers_without_rope=tuple(layer for layer, window in enumerate(windows) if not window),
    )


def _read_windows(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    """Read the windows. Without them, all layers have full attention and rotate queries and keys."""
    pattern = reader.value("sliding_window_pattern")
    if reader.value("sliding_window") is None:
        check_sliding_window(reader, num_hidden_layers, 0, has_experts=False)
        return ()

    # Published folders have one letter for each layer up to the next one with full attention.
    period = len(pattern) if isinstance(pattern, str) else pattern
    if type(period) is not int or period < 1 or pattern not in (period, _letters(period)):
        reader.refuse("sliding_window_pattern", f"only numbers, and letters such as {_letters(4)!r}")
        return ()
    return read_windows(reader, num_hidden_layers, full_every=period)


def _letters(period: int) -> str:
    """Return the letters of layers of which each n-th has full attention."""
    return "L" * (period - 1) + "G"


def _period(windows: tuple[int, ...]) -> int:
    """Return the number of layers up to the first one with full attention."""
    return (*windows, 0).index(0) + 1


def _has_irregular_windows(architecture: Architecture) -> bool:
    windows = architecture.windows
    period = _period(windows)
    return any(bool(window) != bool(number % period) for number, window in enumerate(windows, start=1))


def _sglang_replaced(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """SGLang reads the rotary embedding by the names of transformers v4, and the layers by letters."""
    architecture = EXAONE4.read(EXAONE4.reader(fields))
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    windows = architecture.windows
    return {
        "rope_theta": architecture.rope_theta,
        "rope_scaling": None if architecture.rope_scaling is None else rope,
        "sliding_window_pattern": _letters(_period(windows)) if any(windows) else None,
    }


# The windows of the example are shorter than the rows of the tests.
EXAONE4 = Family(
    model_type="exaone4",
    class_prefix="Exaone4",
    read=_read,
    rows=trunk_rows(
        ATTENTION_ROWS,
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_feed_forward=None,
        after_feed_forward="post_feedforward_layernorm",
    ),
    example_fields=EXAMPLE | {"sliding_window": 4, "sliding_window_pattern": 2},
    sglang_replaced=_sglang_replaced,
    sglang_differences={"windows in other layers than all but each n-th": _has_irregular_windows},
    cpu_engine_lacks="sliding windows, for which SGLang's class requires kernels of GPUs",
    models="EXAONE 4.0",
    limits=("SGLang on GPUs only",),
)
