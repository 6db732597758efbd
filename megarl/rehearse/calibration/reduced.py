"""Models of a run's width with few layers: all that launching a layer, or decoding with it, depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters
from megarl.models.families import read_architecture, read_fields

_LAYERS = "num_hidden_layers"
_TEXT = "text_config"
# Dense layers at the beginning of a model with experts, which are few: the reduced model has none.
_DENSE_LAYERS = "first_k_dense_replace"
_FEED_FORWARDS = "mlp_layer_types"  # specifies the same by layer
# Lists of layer numbers.
_NUMBERS = ("mlp_only_layers",)
_PREDICTORS = "num_nextn_predict_layers"


def reduced_config(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a config.json with fewer layers, and otherwise the same model."""
    if _TEXT in config:
        return {**config, _TEXT: reduced_config(config[_TEXT], num_layers)}

    all_layers = config[_LAYERS]
    # Most layers of the whole model are sparse, so those that are measured are, too.
    num_dense = config.get(_DENSE_LAYERS, 0) if num_layers < all_layers else 0
    # A list with an element per layer, such as layer_types.
    reduced = {
        key: value[:num_layers] if isinstance(value, list) and len(value) == all_layers else value
        for key, value in config.items()
    }
    if num_dense:
        reduced[_DENSE_LAYERS] = 0
        if _FEED_FORWARDS in config:
            reduced[_FEED_FORWARDS] = ["sparse"] * num_layers
    reduced |= {
        key: [layer for layer in config[key] if layer < num_layers] for key in _NUMBERS if key in config
    }
    if config.get(_PREDICTORS):
        reduced[_PREDICTORS] = 0

    return reduced | {_LAYERS: num_layers}


def write_reduced(path: str, num_layers: int, folder: Path) -> Architecture:
    """Write a reduced model of the one at `path`, which consists of its config.json, and read it."""
    config = read_fields(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(reduced_config(config, num_layers)), encoding="utf-8")

    # The original folder was accepted already, with its own code or without.
    return read_architecture(str(folder), trust_remote_code=True)


def most_layers(path: str, folder: Path, element_bytes: int, memory_bytes: float, limit: int) -> int:
    """Return the most layers, at most `limit`, with which the model's weights fit into a memory.

    Returns:
        0 if not even two layers fit.
    """
    config = read_fields(path)
    limit = min(limit, config.get(_TEXT, config)[_LAYERS])

    for num_layers in range(limit, 1, -1):
        architecture = write_reduced(path, num_layers, folder)
        if num_parameters(architecture) * element_bytes <= memory_bytes:
            return num_layers
    return 0
