"""Llama 2 and 3, and other families with Llama's layers: Mistral, Mixtral, Ministral and SmolLM3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.config_reader import OF_CLASS, ConfigReader, check_sliding_window, read_windows
from megarl.models.experts import SGLANG_DIFFERENCES, expert_rows, read_softmax_experts
from megarl.models.family import Family, SGLangStages
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk


def _read_windows(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    # Null means full attention.
    if reader.value("sliding_window") is None:
        check_sliding_window(reader, num_hidden_layers, 0, has_experts=False)
        return ()
    return read_windows(reader, num_hidden_layers, full_every=None)


def _read_smollm(reader: ConfigReader) -> Architecture:
    architecture = read_trunk(reader)
    return replace(
        architecture, layers_without_rope=_read_layers_without_rope(reader, architecture.num_hidden_layers)
    )


def _read_layers_without_rope(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    """Read the layers without rotary embedding. `no_rope_layers` has 0 for them, and 1 for the others."""
    interval = reader.number("no_rope_layer_interval", int, OF_CLASS)
    marks = reader.take("no_rope_layers")
    if marks is None:
        marks = [int(number % interval != 0) for number in range(1, num_hidden_layers + 1)]

    is_list = isinstance(marks, list) and len(marks) == num_hidden_layers
    if not is_list or not all(mark in (0, 1) for mark in marks):
        needed = f"must have 0 or 1 for each of {counted(num_hidden_layers, 'layer')}"
        reader.conflict(f"field 'no_rope_layers' is {marks!r}, but {needed}", "num_hidden_layers")
        return ()

    return tuple(layer for layer, rotates in enumerate(marks) if not rotates)


# The example is a tiny Llama 3.1 with scaled long wavelengths.
LLAMA = Family(
    model_type="llama",
    class_prefix="Llama",
    read=read_trunk,
    rows=TRUNK_ROWS,
    example_fields=EXAMPLE
    | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    sglang_stages=SGLangStages.head_on_every,
    models="Llama 2 and 3.0 to 3.3, and other models published as `LlamaForCausalLM`",
)
# Dense models with full attention. Mistral 7B v0.1 has a sliding window, which is refused. The heads of the
# example, a tiny Mistral Nemo, are together wider than the hidden size.
MISTRAL = Family(
    model_type="mistral",
    class_prefix="Mistral",
    read=read_trunk,
    rows=TRUNK_ROWS,
    example_fields=EXAMPLE | {"head_dim": 32, "sliding_window": None},
    sglang_stages=SGLangStages.head_on_every,
    models="Mistral 7B from v0.2 on, Nemo, Small, Large 2, Ministral 8B",
)
# Every layer has experts, and no layer has a dense feed-forward.
MIXTRAL = Family(
    model_type="mixtral",
    class_prefix="Mixtral",
    read=partial(read_trunk, read_experts=partial(read_softmax_experts, size_field="intermediate_size")),
    rows=(*TRUNK_ROWS, *expert_rows("block_sparse_moe", gate="w1", up="w3", down="w2")),
    example_fields=EXAMPLE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    sglang_stages=SGLangStages.head_on_every,
    sglang_differences=SGLANG_DIFFERENCES,
    models="Mixtral 8x7B and 8x22B",
)
# Some or all layers have a sliding window. Those of the example are shorter than the rows of the tests.
MINISTRAL = Family(
    model_type="ministral",
    class_prefix="Ministral",
    read=partial(read_trunk, read_windows=_read_windows),
    rows=TRUNK_ROWS,
    example_fields=EXAMPLE | {"head_dim": 32, "sliding_window": 4},
    sglang_class=False,
    models="models of the class `MinistralForCausalLM`, with sliding windows",
)
# Each fourth layer does not rotate queries and keys (Hugging Face 2025).
SMOLLM3 = Family(
    model_type="smollm3",
    class_prefix="SmolLM3",
    read=_read_smollm,
    rows=TRUNK_ROWS,
    example_fields=EXAMPLE | {"no_rope_layer_interval": 2},
    sglang_class=False,
    models="SmolLM3",
)
