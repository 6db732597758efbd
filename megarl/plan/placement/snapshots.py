"""The host memory of snapshots of the training state (`recovery.enabled`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import DType, RunConfig
from megarl.models.architecture import Architecture
from megarl.plan.placement.memory import model_state, stage_of, trained_parameters, weight_bytes
from megarl.plan.placement.placement_plan import PlacementPlan

NUM_KEPT = 2  # snapshots in memory: the newest complete one, and the next
_FLOAT32 = 4


def rank_snapshot_bytes(model: ModelRole, architecture: Architecture, dtype: DType, stage: int) -> int:
    """Return the bytes of one snapshot of a rank: what a checkpoint restores in its memory.

    With float32 weights, the optimizer's part of them is stored a second time, as the master weights.
    """
    state = model_state(model, architecture, dtype, stage)
    trained = trained_parameters(model, architecture, stage)
    adapts = architecture.lora is not None
    parameters = trained.total * weight_bytes(dtype) if adapts else state.parameters
    if dtype is not DType.float32:
        return parameters + state.optimizer
    parallel = model.parallel
    masters = -(-trained.dense * _FLOAT32 // parallel.num_copies)
    masters += -(-trained.of_experts * _FLOAT32 // parallel.expert_data_parallel_size)
    return parameters + state.optimizer + masters


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
