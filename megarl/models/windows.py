"""Read the types of layers and the sliding windows of attention from `config.json`."""

from __future__ import annotations

import json

from megarl.machine.errors import counted
from megarl.models.config_reader import OF_CLASS, ConfigReader

_WINDOWED = "sliding_attention"
FULL = "full_attention"


def read_layer_types(
    reader: ConfigReader, num_hidden_layers: int, other: str, *, full_every: int | None
) -> list[str]:
    """Read the type of each layer: full attention, or the other type of a family. Empty if it is invalid.

    Args:
        full_every: Without `layer_types`, each layer whose number, counted from 1, is a multiple of this has
            full attention; None: no layer has.
    """
    kinds = reader.take("layer_types")
    if kinds is None:
        kinds = [
            FULL if full_every is not None and number % full_every == 0 else other
            for number in range(1, num_hidden_layers + 1)
        ]

    is_list = isinstance(kinds, list) and len(kinds) == num_hidden_layers
    if not is_list or not all(kind in (other, FULL) for kind in kinds):
        needed = f"must name {other} or {FULL} for each of {counted(num_hidden_layers, 'layer')}"
        reader.conflict(f"field 'layer_types' is {kinds!r}, but {needed}", "num_hidden_layers")
        return []
    return kinds


def read_windows(reader: ConfigReader, num_hidden_layers: int, *, full_every: int | None) -> tuple[int, ...]:
    """Read the window of each layer: the number of tokens that it sees, or 0 for all.

    Args:
        full_every: As in `read_layer_types`.
    """
    window = reader.number("sliding_window", int, OF_CLASS)
    kinds = read_layer_types(reader, num_hidden_layers, _WINDOWED, full_every=full_every)
    return tuple(window if kind == _WINDOWED else 0 for kind in kinds)


def check_sliding_window(
    reader: ConfigReader,
    num_hidden_layers: int,
    max_position_embeddings: int,
    *,
    has_experts: bool,
) -> None:
    """Refuse a sliding window that a layer would use, unless every row fits into it.

    Qwen2.5 publishes `sliding_window` with `use_sliding_window: false`. transformers applies the window to
    layers from `max_window_layers` on (in Qwen2-MoE, to the layers before it), unless `layer_types` lists the
    type of each layer. A window without its switch counts as used; a window of zero tokens does not.
    """
    layer_types = reader.take("layer_types")
    window = reader.value("sliding_window")
    switch = reader.value("use_sliding_window")
    first_windowed = reader.value("max_window_layers")

    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_hidden_layers:
            needed = f"must name one type for each of {counted(num_hidden_layers, 'layer')}"
            reader.conflict(f"field 'layer_types' is {layer_types!r}, but {needed}", "num_hidden_layers")
        elif other := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            named = ", ".join(other)
            reader.problems.append(f"field 'layer_types' has {named}; only full_attention is supported")
    elif isinstance(window, int) and window >= max_position_embeddings:
        return
    elif switch or (switch is None and window):
        # A dense model is unaffected if its windowed layers would begin after the last layer.
        if isinstance(first_windowed, int) and first_windowed >= num_hidden_layers and not has_experts:
            return
        reader.conflict(
            f"field 'use_sliding_window' is {json.dumps(switch)} with 'sliding_window' {json.dumps(window)} "
            f"and 'max_window_layers' {json.dumps(first_windowed)}: not all of "
            f"{counted(num_hidden_layers, 'layer')} would see every token; only full attention is supported",
            "num_hidden_layers",
            "max_position_embeddings",
        )
