"""Gemma 3 models of text (Google 2025): norms before and after blocks, and sliding windows.

Five of six layers have a sliding window and a rotary embedding of their own.
"""

from __future__ import annotations

from dataclasses import replace

from megarl.models.architecture import Activation, Architecture, BlockNorms
from megarl.models.config_reader import OF_CLASS, ConfigReader, read_windows
from megarl.models.family import Family
from megarl.models.trunk import ATTENTION_ROWS, EXAMPLE, read_trunk, trunk_rows

_ACTIVATION = "gelu_pytorch_tanh"


def _read(reader: ConfigReader) -> Architecture:
    reader.require("hidden_activation", _ACTIVATION, f"only {_ACTIVATION} is supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.require(name, None, "capped logits are not supported")
    if reader.flag("use_bidirectional_attention"):
        reader.refuse("use_bidirectional_attention", "only false is supported")
    reader.take("cache_implementation")  # of generation

    architecture = read_trunk(
        reader,
        qk_norm=True,
        read_windows=_read_windows,
        local_theta_field="rope_local_base_freq",
    )
    return replace(
        architecture,
        norms=BlockNorms(before=True, after=True, zero_centered=True),
        activation=Activation.gelu_tanh,
        embedding_scale=architecture.hidden_size**0.5,
        softmax_scale=reader.number("query_pre_attn_scalar", float, OF_CLASS) ** -0.5,
    )


def _read_windows(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    # Without the field, each sixth layer has full attention. The second is a copy that transformers writes in
    # addition to `layer_types`.
    pattern = reader.number("sliding_window_pattern", int, 6)
    reader.take("_sliding_window_pattern")
    return read_windows(reader, num_hidden_layers, full_every=pattern)


# The windows of the example are shorter than the rows of the tests.
GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    class_prefix="Gemma3",
    read=_read,
    rows=trunk_rows(
        ATTENTION_ROWS,
        after_attention="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        after_feed_forward="post_feedforward_layernorm",
    ),
    example_fields={name: value for name, value in EXAMPLE.items() if name != "hidden_act"}
    | {
        "head_dim": 32,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
        "hidden_activation": _ACTIVATION,
    },
    sglang_differences={
        "an output layer of its own": lambda architecture: not architecture.tie_word_embeddings,
        "a RoPE scaling": lambda architecture: architecture.rope_scaling is not None,
        "a RoPE scaling of layers with a window": lambda architecture: (
            architecture.local_rope is not None and architecture.local_rope[1] is not None
        ),
    },
    models="Gemma 3 270M and 1B",
)
