"""SmolLM3 (Hugging Face 2025): Llama's layers, of which each fourth does not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.models.config_reader import OF_CLASS, ConfigReader
from megarl.models.family import Family
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk


def _read(reader: ConfigReader) -> Architecture:
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


def _example() -> dict[str, Any]:
    return EXAMPLE | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
    }


SMOLLM3 = Family(
    model_type="smollm3",
    class_prefix="SmolLM3",
    read=_read,
    rows=TRUNK_ROWS,
    example=_example,
    sglang_class=False,
    models="SmolLM3",
)
