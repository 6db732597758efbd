"""Memory of Transformer Engine's layers that local layers do not need. Pure."""

from __future__ import annotations

from enum import Enum

from megarl.config.layers import trains_adapters
from megarl.config.schema import CPCommType, Device, DType, Layers, ParallelConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.layers import linears_of, replaces_core, routes_tokens

# The workspace of cuBLAS on Hopper. A grouped product runs on four streams with one each.
WORKSPACE_BYTES = 32 * 1024**2 + 1024
_GROUPED_STREAMS = 4


class LayerKind(Enum):
    """The layers of a run, if the configuration determines them."""

    local = "local"
    fused = "transformer_engine"
    either = "either"  # Transformer Engine's if the run's machines have it


def layer_kind(config: RunConfig) -> LayerKind:
    """Return the kind of layers of a run. `device: auto` counts as a GPU."""
    asked = config.engine.layers
    if asked is not Layers.auto:
        return LayerKind(asked.value)
    on_cpu = config.device is Device.cpu
    return LayerKind.local if on_cpu or config.model.dtype is DType.float32 else LayerKind.either


def always_gathers(config: RunConfig, architecture: Architecture, kind: LayerKind) -> bool:
    """Return whether context-parallel ranks gather keys and values in every micro-batch.

    Otherwise, they gather them where rows share a prompt, and pass them on in a ring elsewhere.
    """
    asked = config.engine.cp_comm_type is CPCommType.all_gather
    is_local = kind is LayerKind.local or trains_adapters(config)
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
