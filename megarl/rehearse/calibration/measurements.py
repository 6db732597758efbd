"""The plan of a calibration and its results, as they travel between processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.config.schema import DType, EngineConfig, MegatronConfig, ModelConfig, RolloutConfig
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import dimension_sizes
from megarl.plan.step_time.counts import Product

MIB = 2**20
# Bytes of the larger of input and output of a collective, on a GPU and on a CPU.
_CUDA_BYTES = tuple(2**power for power in (12, 16, 18, 20, 22, 24, 26, 28))
_CPU_BYTES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22))
_CUDA_ROWS = (128, 512, 2048, 8192)
_CPU_ROWS = (32, 128, 512, 2048)
_CUDA_SQUARES = (2048, 4096, 8192)
_CPU_SQUARES = (512, 1024)
_CUDA_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CPU_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """The plan of a calibration.

    Attributes:
        is_cuda: Whether the devices are GPUs.
        num_ranks: The devices of this machine, each measured by its own process.
        dtype: The dtype of the run's weights.
        squares: The sizes of square products, which find the peak.
        products: The products of a layer, for several numbers of rows.
        attention_tokens: The length of the rows whose attention is measured.
        copied_bytes: The size of copies and of the written file.
        batches: The batch sizes of the decode sweep.
        megatron: Options that the run passes on to Megatron.
        rollout: The section `rollout`; None for a run that does not generate.
        folder: A folder for files that only live as long as the calibration.
    """

    is_cuda: bool
    num_ranks: int
    dtype: DType
    squares: tuple[int, ...]
    products: tuple[Product, ...]
    attention_tokens: int
    copied_bytes: int
    collective_bytes: tuple[int, ...]
    batches: tuple[int, ...]
    model: ModelConfig
    engine: EngineConfig
    megatron: MegatronConfig
    rollout: RolloutConfig | None
    architecture: Architecture
    folder: str


def make_request(
    *,
    is_cuda: bool,
    num_ranks: int,
    dtype: DType,
    tensor_parallel_size: int,
    model: ModelConfig,
    engine: EngineConfig,
    megatron: MegatronConfig,
    rollout: RolloutConfig | None,
    architecture: Architecture,
    folder: str,
) -> CalibrationRequest:
    """Choose sizes for the device: those of a CPU take seconds, where a GPU's would take minutes."""
    rows = _CUDA_ROWS if is_cuda else _CPU_ROWS
    return CalibrationRequest(
        is_cuda=is_cuda,
        num_ranks=num_ranks,
        dtype=dtype,
        squares=_CUDA_SQUARES if is_cuda else _CPU_SQUARES,
        products=tuple(
            Product(count, inner, columns)
            for count in rows
            for inner, columns in layer_matrices(architecture, tensor_parallel_size)
        ),
        attention_tokens=min(architecture.row_limit.tokens, 4096 if is_cuda else 512),
        copied_bytes=(1024 if is_cuda else 64) * MIB,
        collective_bytes=_CUDA_BYTES if is_cuda else _CPU_BYTES,
        batches=_CUDA_BATCHES if is_cuda else _CPU_BATCHES,
        model=model,
        engine=engine,
        megatron=megatron,
        rollout=rollout,
        architecture=architecture,
        folder=folder,
    )


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
