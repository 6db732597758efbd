"""The sizes of the tensors of a layer on one rank, and the kernels that compute it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from megarl.config.schema import Device, DType, ParallelConfig, RunConfig
from megarl.models.architecture import Architecture


class Kernels(Enum):
    """What attention, norms and activations are made of."""

    flash = "flash"  # of CUDA, for 16 bits
    plain = "plain"  # of CUDA, for float32: attention is a product of matrices
    cpu = "cpu"


class LayerWidths(NamedTuple):
    """Elements of one token on one rank. whole: a hidden state; part: that where sequence parallelism cuts
    it; query, key (and as much for values), gate (and as much for up) of attention and MLP; squares: its row
    of each head's product of queries and keys, where attention makes it."""

    whole: int
    part: int
    query: int
    key: int
    gate: int
    squares: int


def kernels_of(config: RunConfig) -> Kernels:
    """`device: auto` is taken for a GPU."""
    if config.device is Device.cpu:
        return Kernels.cpu
    return Kernels.plain if config.model.dtype is DType.float32 else Kernels.flash


def widths_of(architecture: Architecture, parallel: ParallelConfig, row: int) -> LayerWidths:
    cut = parallel.tensor_parallel_size
    heads = architecture.num_attention_heads // cut
    return LayerWidths(
        whole=architecture.hidden_size,
        part=architecture.hidden_size // (cut if parallel.sequence_parallel else 1),
        query=heads * architecture.head_dim,
        key=architecture.num_key_value_heads * architecture.head_dim // cut,
        gate=architecture.intermediate_size // cut * (architecture.num_dense_layers > 0),
        squares=heads * row,
    )


def chunks_under_way(parallel: ParallelConfig, stage: int) -> int:
    """Micro-batches, each in one virtual stage, whose activations a stage keeps at the same time: 1F1B has
    one under way in this stage and in each after it; interleaved stages begin more of them (Narayanan et al.
    2021, section 2.2)."""
    stages = parallel.pipeline_parallel_size
    virtual = parallel.virtual_pipeline_parallel_size or 1
    return stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
