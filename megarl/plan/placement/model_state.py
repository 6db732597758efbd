"""The state of a model on one rank: parameters, gradients, optimizer state, and snapshots of them. Pure.

Parameters, gradients and optimizer state are counted to the element, as Megatron allocates them (its buffers
are padded by less than 1%). Snapshots are kept in host memory (`recovery.enabled`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields

from megarl.config.megatron_options import element_bytes
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import DType, Layers, ParallelConfig, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import (
    ParameterCount,
    num_tower_parameters,
    rank_parameters,
    without_saved_modules,
)
from megarl.models.layers import layers_of
from megarl.plan.placement.layer_sizes import Kernels, kernels_of, layer_kind, layers_of_stage
from megarl.plan.placement.placement_plan import PlacementPlan

NUM_KEPT = 2  # snapshots in memory: the newest complete one, and the next
_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory of one role on one device, in bytes.

    `activations` is the working memory in addition to the state, and what remains of it when the model is
    idle.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))


def stage_of(parallel: ParallelConfig, rank: int) -> int:
    """Return the pipeline stage of a rank."""
    return parallel.coordinate(rank).pp


def weight_bytes(dtype: DType) -> int:
    return 4 if dtype is DType.float32 else 2


def model_state(model: ModelRole, architecture: Architecture, dtype: DType, stage: int) -> Usage:
    """Return the parameters, gradients and optimizer state of one rank of a pipeline stage.

    Weights are in `dtype`. A model that trains also has gradients and, sharded over the ranks with equal
    weights (ZeRO 1; fewer ranks for experts), moments and, for bfloat16, a float32 master copy. Gradients
    and moments are float32, unless the options of Megatron say otherwise.
    """
    parallel = model.parallel
    held = stage_parameters(architecture, parallel, stage, with_value_head=model.with_value_head)
    parameters = held.total * weight_bytes(dtype)
    if model.optim is None:
        return Usage(parameters=parameters)

    # A reference that is this model without its adapters has the original weights of saved modules.
    parameters += base_copies(model, architecture, stage) * weight_bytes(dtype)

    # Frozen parameters have neither gradients nor optimizer state.
    trained = trained_parameters(model, architecture, stage)
    of_element = element_bytes(dtype, model.megatron, model.optim.kind)
    return Usage(
        parameters=parameters,
        gradients=trained.total * of_element.gradient,
        optimizer=sum(_sharded(trained, parallel, of_element.moments + of_element.master)),
    )


def _sharded(trained: ParameterCount, parallel: ParallelConfig, size: int) -> tuple[int, int]:
    """Return a rank's share of `size` bytes for each trained parameter: of dense ones, and of experts.

    Experts have fewer copies than dense weights, so ZeRO 1 divides their state by less.
    """
    dense = -(-trained.dense * size // parallel.num_copies)
    return dense, -(-trained.of_experts * size // parallel.expert_data_parallel_size)


def step_memory(
    config: RunConfig, model: ModelRole, architecture: Architecture, stage: int
) -> tuple[int, int]:
    """Return the temporary bytes of a rank's reduction of gradients, and of its optimizer step.

    After the last micro-batch, Megatron sums a copy of some gradients over tensor-parallel ranks. The step
    has float32 copies of gradients of another dtype. Experts have a separate optimizer.
    """
    assert model.optim is not None
    optimizer = model.optim.kind
    trained = trained_parameters(model, architecture, stage)
    dense, of_experts = _sharded(trained, model.parallel, 1)
    of_element = element_bytes(config.model.dtype, model.megatron, optimizer)
    # With sequence parallelism, each rank has the gradients of its own tokens.
    reduced = trained.replicated * of_element.gradient * model.parallel.sequence_parallel
    stepped = of_element.stepped * (dense + of_experts)
    # Torch materializes the temporary tensors of all parameters of an optimizer at once on CUDA. Transformer
    # Engine does not.
    if kernels_of(config) is not Kernels.cpu and layer_kind(config) is not Layers.transformer_engine:
        stepped += optimizer.needs.step_copies * _FLOAT32 * max(dense, of_experts)
    return reduced, stepped


def quantized_bytes(model: ModelRole, architecture: Architecture, stage: int) -> int:
    """Return the bytes of the copies in FP8 that Transformer Engine keeps of a rank's weights; 0 without FP8.

    The first pass makes them, and they are dropped when the weights are offloaded. A model that trains has
    one for the forward pass and a transposed one for the backward pass. FP4 counts as much.
    """
    options = model.megatron.transformer
    if not (options.get("fp8") or options.get("fp4")):
        return 0
    parallel = model.parallel
    elements = 0
    layers = layers_of(architecture)
    for part in (part for layer in layers_of_stage(architecture, parallel, stage) for part in layers[layer]):
        for matrix in part.matrices:
            held = matrix.on_rank(parallel.tensor_parallel_size, parallel.expert_tensor_parallel_size)
            copies = max(1, matrix.num_experts // parallel.expert_parallel_size)
            elements += matrix.is_linear * copies * held.outputs * held.inputs
    directions = 1 if model.optim is None else 2
    # The recipe with the most scales has a byte for each 32 elements.
    return directions * elements * 33 // 32


def trained_parameters(model: ModelRole, architecture: Architecture, stage: int) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds and trains.

    A frozen vision tower and frozen indexers have neither gradients nor optimizer state.
    """
    trained = stage_parameters(
        architecture,
        model.parallel,
        stage,
        with_value_head=model.with_value_head,
        trained_only=architecture.is_partly_frozen,
    )
    is_frozen = model.freeze_vision and stage == 0
    return trained._replace(dense=trained.dense - is_frozen * num_tower_parameters(architecture))


def base_copies(model: ModelRole, architecture: Architecture, stage: int) -> int:
    """Count the parameters of which one rank of a stage holds the original values as well."""
    if not model.runs_base:
        return 0
    alone = trained_parameters(model, without_saved_modules(architecture), stage)
    return trained_parameters(model, architecture, stage).total - alone.total


def stage_parameters(
    architecture: Architecture,
    parallel: ParallelConfig,
    stage: int,
    with_value_head: bool,
    trained_only: bool = False,
) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds."""
    return rank_parameters(
        architecture,
        layers=layers_of_stage(architecture, parallel, stage),
        is_first_stage=stage == 0,
        is_last_stage=stage == parallel.pipeline_parallel_size - 1,
        tensor_parallel_size=parallel.tensor_parallel_size,
        expert_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        with_value_head=with_value_head,
        trained_only=trained_only,
    )


def rank_snapshot_bytes(model: ModelRole, architecture: Architecture, dtype: DType, stage: int) -> int:
    """Return the bytes of one snapshot of a rank: what a checkpoint restores in its memory.

    With float32 weights, the optimizer's part of them is stored a second time, as the master weights.
    """
    state = model_state(model, architecture, dtype, stage)
    trained = trained_parameters(model, architecture, stage)
    parameters = state.parameters if architecture.lora is None else trained.total * weight_bytes(dtype)
    if dtype is not DType.float32:
        return parameters + state.optimizer
    return parameters + state.optimizer + sum(_sharded(trained, model.parallel, _FLOAT32))


def snapshot_bytes(
    config: RunConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]
) -> dict[int, int]:
    """Return the bytes of all snapshots and copies on each node with a rank of a trained model.

    Each node also holds copies of the snapshots of one other node. The result is empty without recovery.
    """
    if not config.recovery.enabled:
        return {}
    own: dict[int, int] = defaultdict(int)
    for model in model_roles(config):
        if model.optim is None:
            continue
        architecture = architectures[model.name]
        for process in plan.group_of(model.name).processes:
            stage = stage_of(model.parallel, process.rank)
            size = rank_snapshot_bytes(model, architecture, config.model.dtype, stage)
            own[process.node] += NUM_KEPT * size

    # Copies go from each node to the next one.
    nodes = list(own)
    if len(nodes) == 1:
        return dict(own)
    return {node: own[node] + own[nodes[number - 1]] for number, node in enumerate(nodes)}
