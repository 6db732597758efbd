"""The plan of a calibration and its results, as they travel between processes, and the models it measures.

Models have a run's width and few layers, all that launching a layer, or decoding with it, depends on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import DType, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters
from megarl.models.experts import has_feed_forward_types
from megarl.models.families import read_architecture, read_fields
from megarl.models.tensor_table import dimension_sizes
from megarl.plan.step_time.counts import Product

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The plan of a calibration. Sizes for a CPU take seconds, where a GPU's would take minutes.

    Attributes:
        config: The run whose shapes and dtype are measured.
        architecture: The model of its first role, without adapters.
        is_cuda: Whether the devices are GPUs.
        num_ranks: The devices of this machine, each measured by its own process.
        folder: A folder for files that only live as long as the calibration.
    """

    config: RunConfig
    architecture: Architecture
    is_cuda: bool
    num_ranks: int
    folder: str

    @property
    def role(self) -> ModelRole:
        return model_roles(self.config)[0]

    @property
    def dtype(self) -> DType:
        return self.config.model.dtype

    @property
    def products(self) -> list[Product]:
        """The products of a layer, for several numbers of rows."""
        rows = (128, 512, 2048, 8192) if self.is_cuda else (32, 128, 512, 2048)
        matrices = layer_matrices(self.architecture, self.role.parallel.tensor_parallel_size)
        return [Product(count, inner, columns) for count in rows for inner, columns in matrices]

    @property
    def batches(self) -> list[int]:
        """The batch sizes of the decode sweep."""
        return [2**power for power in range(9 if self.is_cuda else 5)]


def layer_matrices(architecture: Architecture, tensor_parallel_size: int) -> list[tuple[int, int]]:
    """Return (inner, columns) of the main products of a layer on one tensor-parallel rank.

    They are those of queries, keys and values, of the attention's output, of gate and up, and of down. The
    feed-forward of a layer with experts is that of one expert.
    """
    hidden = architecture.hidden_size
    heads = architecture.num_attention_heads * architecture.head_dim
    key_values = 2 * architecture.num_key_value_heads * architecture.head_dim
    intermediate = dimension_sizes(architecture)["M"] or architecture.intermediate_size

    def share(size: int) -> int:
        return max(1, size // tensor_parallel_size)

    return [
        (hidden, share(heads + key_values)),
        (share(heads), hidden),
        (hidden, share(2 * intermediate)),
        (share(intermediate), hidden),
    ]


class ProductTime(NamedTuple):
    """Seconds of one matrix product."""

    shape: Product
    dtype: str
    seconds: float

    @property
    def tflops(self) -> float:
        return self.shape.flops / self.seconds / 1e12


class CollectiveTime(NamedTuple):
    """Seconds of one collective. `nbytes` is the larger of a rank's input and output."""

    kind: str
    num_ranks: int
    nbytes: int
    seconds: float


class DecodeTime(NamedTuple):
    """Seconds of one decode step of the rollout engine.

    Attributes:
        batch: The number of sequences.
        tokens: The mean number of tokens in the cache of each sequence.
    """

    batch: int
    seconds: float
    tokens: float


class RankMeasurements(NamedTuple):
    """The measurements of one rank, made while all other ranks of the machine made the same.

    Attributes:
        squares: Square products in each dtype.
        products: The products of a layer in the run's dtype.
        attention_tflops: Rate of attention, forward and backward, by the operations that the mask leaves.
        memory_gb_s: Bytes read and written per second by a copy on the device, in 10**9.
        host_gb_s: Bytes per second of a copy to the host, in 10**9.
        storage_gb_s: Bytes per second of a file that is written and flushed, in 10**9. None except on rank 0.
        collectives: Collectives of all ranks; empty for one rank.
        layers: The numbers of layers of two models, and the host seconds of a forward pass with few tokens
            of each. Empty if the layers do not fit into the device's memory.
    """

    device: str
    memory_bytes: int
    squares: tuple[ProductTime, ...]
    products: tuple[ProductTime, ...]
    attention_tflops: float
    memory_gb_s: float
    host_gb_s: float
    storage_gb_s: float | None
    collectives: tuple[CollectiveTime, ...]
    layers: tuple[tuple[int, float], ...]


class DecodeSweep(NamedTuple):
    """The decode steps of an engine with one rank.

    Attributes:
        times: By batch size, the smallest first.
        num_layers: The layers of the model that was decoded.
        weight_bytes: The bytes of weights that a step of a dense model reads.
        problem: Why there is no sweep; None if there is one.
    """

    times: tuple[DecodeTime, ...] = ()
    num_layers: int = 1
    weight_bytes: int = 0
    cache_bytes: int = 0
    problem: str | None = None


_LAYERS = "num_hidden_layers"
_TEXT = "text_config"
# Dense layers at the beginning of a model with experts, which are few: the reduced model has none.
_DENSE_LAYERS = "first_k_dense_replace"
_FEED_FORWARDS = "mlp_layer_types"  # specifies the same by layer
_PATTERN = "hybrid_override_pattern"  # has a letter per layer
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
    if isinstance(config.get(_PATTERN), str):
        reduced[_PATTERN] = config[_PATTERN][:num_layers]
    if num_dense:
        reduced[_DENSE_LAYERS] = 0
        if has_feed_forward_types(config):
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
