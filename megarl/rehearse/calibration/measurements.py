"""The plan of a calibration and its results, as they travel between processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import DType, RunConfig
from megarl.models.architecture import Architecture
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
