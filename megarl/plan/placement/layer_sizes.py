"""The layers and kernels of a run, and the sizes of a layer's tensors on one rank. Pure."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from itertools import chain

from megarl.config.layers import trains_adapters
from megarl.config.schema import CPCommType, Device, DType, Layers, ParallelConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import layers_of, linears_of, replaces_core, routes_tokens

# The workspace of cuBLAS on Hopper. A grouped product runs on four streams with one each.
WORKSPACE_BYTES = 32 * 1024**2 + 1024
_GROUPED_STREAMS = 4


class Kernels(Enum):
    """The kernels of attention, norms and activations."""

    flash = "flash"  # CUDA, for 16-bit dtypes
    plain = "plain"  # CUDA, for float32: attention is explicit matrix products
    cpu = "cpu"


def kernels_of(config: RunConfig) -> Kernels:
    """Return the kernels of a run. `device: auto` counts as a GPU."""
    if config.device is Device.cpu:
        return Kernels.cpu
    return Kernels.plain if config.model.dtype is DType.float32 else Kernels.flash


def layers_of_stage(architecture: Architecture, parallel: ParallelConfig, stage: int) -> tuple[int, ...]:
    """Return a stage's global layer numbers, in the order of its virtual stages."""
    return tuple(chain.from_iterable(parallel.chunks_of_stage(architecture.num_hidden_layers, stage)))


def alike_stages(architecture: Architecture, parallel: ParallelConfig) -> tuple[int, ...]:
    """Return for each stage the first one like it: the first, the last, or one with the same layers."""
    last = parallel.pipeline_parallel_size - 1
    found: dict[tuple[bool, bool, frozenset[tuple[object, int]]], int] = {}
    alike = []
    for stage in range(parallel.pipeline_parallel_size):
        layers = layers_of_stage(architecture, parallel, stage)
        kinds = Counter(layers_of(architecture)[layer] for layer in layers)
        alike.append(found.setdefault((stage == 0, stage == last, frozenset(kinds.items())), stage))
    return tuple(alike)


def chunks_under_way(parallel: ParallelConfig, stage: int) -> int:
    """Return how many micro-batches keep their activations on a stage at the same time, per virtual stage.

    1F1B has one in flight on this stage and on each later one. Interleaved stages start more of them
    (Narayanan et al. 2021, section 2.2).
    """
    stages = parallel.pipeline_parallel_size
    virtual = parallel.virtual_pipeline_parallel_size or 1
    return stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1


def layer_kind(config: RunConfig) -> Layers:
    """Return the kind of layers of a run. `device: auto` counts as a GPU.

    `auto` is returned if the run's machines decide: layers are Transformer Engine's where it is installed.
    """
    asked = config.engine.layers
    is_plain = config.device is Device.cpu or config.model.dtype is DType.float32
    return Layers.local if asked is Layers.auto and is_plain else asked


def always_gathers(config: RunConfig, architecture: Architecture, kind: Layers) -> bool:
    """Return whether context-parallel ranks gather keys and values in every micro-batch.

    Otherwise, they gather them where rows share a prompt, and pass them on in a ring elsewhere.
    """
    asked = config.engine.cp_comm_type is CPCommType.all_gather
    is_local = kind is Layers.local or trains_adapters(config)
    return is_local or asked or replaces_core(architecture)


def workspace_bytes(architecture: Architecture) -> int:
    """Return the bytes of workspaces, which remain allocated from the first pass on."""
    return WORKSPACE_BYTES * (1 + _GROUPED_STREAMS * routes_tokens(architecture))


def placeholder_elements(architecture: Architecture, parallel: ParallelConfig) -> int:
    """Return the elements of the gradients that autograd receives in place of the accumulated ones.

    Weight gradients are added to Megatron's buffer directly. For autograd there is one tensor of each shape
    that a weight of the rank has, which remains allocated from the first backward pass on.
    """
    tensor = parallel.tensor_parallel_size
    expert_tensor = parallel.expert_tensor_parallel_size
    held = (matrix.on_rank(tensor, expert_tensor) for matrix in linears_of(architecture))
    # Weights of one shape share a tensor.
    return sum(rows * columns for rows, columns in {(matrix.outputs, matrix.inputs) for matrix in held})
