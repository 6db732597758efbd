"""Measures the host time of a layer in the training engine, on models of the run's width.

With few tokens, a GPU has finished a kernel before the next one is launched, so the time of a forward pass is
that of the launches.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import Device, DType, ParallelConfig, RoutingReplay
from megarl.engine import groups as engine_groups
from megarl.engine.engine import MegatronEngine
from megarl.engine.groups import ParallelGroups
from megarl.engine.spec import ModelSpec
from megarl.rehearse.calibration.measurements import CalibrationRequest, LayerTime
from megarl.rehearse.calibration.reduced import most_layers, write_reduced

# Four layers have every kind of a model that alternates them.
_FEW_LAYERS = 4
_MANY_LAYERS = 8
_DEVIATION = 0.02  # of random weights
_TOKENS = 8  # of a row, prompt and response
_PASSES = 30
_MEMORY_SHARE = 0.3  # of the device, for the weights of the larger model


class _UntrainedEngine(MegatronEngine):
    def _load(self, folder: str) -> None:
        """Draw the weights. Their memory may contain numbers with which a CPU computes slowly."""
        for parameter in self.parameters().values():
            parameter.normal_(std=_DEVIATION)


def layer_times(request: CalibrationRequest, memory_bytes: int) -> tuple[LayerTime, ...]:
    """Time forward passes of two models that differ only in their number of layers.

    Returns:
        Both times; empty if the larger model does not fit into the device's memory.
    """
    folder = Path(request.folder) / f"layers_{torch.distributed.get_rank()}"
    element_bytes = getattr(torch, request.dtype.value).itemsize
    most = most_layers(
        request.model.path, folder, element_bytes, _MEMORY_SHARE * memory_bytes, limit=_MANY_LAYERS
    )
    if most == 0:
        return ()
    few = _FEW_LAYERS if most > _FEW_LAYERS else most // 2

    # Every rank has the whole model, as with data parallelism.
    parallel = ParallelConfig(data_parallel_size=request.num_ranks)
    groups = engine_groups.initialize(parallel, seed=0)
    return tuple(
        LayerTime(num_layers, _seconds(request, num_layers, groups, folder)) for num_layers in (few, most)
    )


def _seconds(request: CalibrationRequest, num_layers: int, groups: ParallelGroups, folder: Path) -> float:
    """Return the host seconds of the fastest forward pass."""
    engine = _engine(request, num_layers, groups, folder)
    rows = _rows()
    # Launching is the work of one thread.
    clock = time.perf_counter if request.is_cuda else time.thread_time
    found = []

    # The first passes compile and allocate.
    for _ in range(_PASSES + 2):
        begin = clock()
        engine.forward(rows, [[0]], extras=())
        found.append(clock() - begin)

    return min(found[2:])


def _engine(
    request: CalibrationRequest, num_layers: int, groups: ParallelGroups, folder: Path
) -> MegatronEngine:
    architecture = write_reduced(request.model.path, num_layers, folder)
    spec = ModelSpec(
        path=str(folder),
        architecture=architecture,
        head="lm",
        dtype=DType(request.dtype),
        parallel=groups.parallel,
        # Random inputs have no routes that a rollout has recorded.
        engine=replace(request.engine, routing_replay=RoutingReplay.off),
        device=Device.cuda if request.is_cuda else Device.cpu,
        seed=0,
        megatron=request.megatron,
    )

    return _UntrainedEngine(spec, groups)


def _rows() -> dict[str, RaggedTensor]:
    """Return one short row of tokens."""
    ids = torch.ones(_TOKENS // 2, dtype=torch.int64)
    lengths = torch.tensor([_TOKENS // 2])
    return {
        "prompts": RaggedTensor.packed_rows(ids, lengths, on_left=True),
        "responses": RaggedTensor.packed_rows(ids, lengths),
        "response_mask": RaggedTensor.constant(True, lengths, torch.bool),
    }
