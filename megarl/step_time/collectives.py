"""The calls between ranks of a layout: which ranks take part, and how many bytes they carry. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megarl.config.schema import ParallelConfig
from megarl.step_time.counts import NOTHING, CollectiveCount, Counts, dtype_bytes


class RankGroup(NamedTuple):
    """Ranks with equal distances between their numbers."""

    num_ranks: int
    stride: int


# The ranks that take part in calls over an axis, in Megatron's order: tensor ranks vary fastest, then
# context, data and pipeline ranks. For experts, expert-tensor ranks of a stage vary fastest, then expert
# ranks.
AXES: dict[str, Callable[[ParallelConfig], RankGroup]] = {
    "tensor": lambda parallel: RankGroup(parallel.tensor_parallel_size, 1),
    "context": lambda parallel: RankGroup(parallel.context_parallel_size, parallel.tensor_parallel_size),
    # All copies of a parameter, including those of context-parallel ranks.
    "data": lambda parallel: RankGroup(parallel.num_copies, parallel.tensor_parallel_size),
    "stage": lambda parallel: RankGroup(parallel.stage_size, 1),
    "stages": lambda parallel: RankGroup(parallel.pipeline_parallel_size, parallel.stage_size),
    # Neighboring stages.
    "pipeline": lambda parallel: RankGroup(min(2, parallel.pipeline_parallel_size), parallel.stage_size),
    # The first and the last stage, which have a tied embedding.
    "embedding": lambda parallel: RankGroup(
        min(2, parallel.pipeline_parallel_size), parallel.stage_size * (parallel.pipeline_parallel_size - 1)
    ),
    "expert": lambda parallel: RankGroup(parallel.expert_parallel_size, parallel.expert_tensor_parallel_size),
    "expert_tensor": lambda parallel: RankGroup(parallel.expert_tensor_parallel_size, 1),
    # All ranks that have a layer's experts once.
    "expert_stage": lambda parallel: RankGroup(
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size, 1
    ),
    "expert_data": lambda parallel: RankGroup(
        parallel.expert_data_parallel_size,
        parallel.expert_parallel_size * parallel.expert_tensor_parallel_size,
    ),
    "all": lambda parallel: RankGroup(parallel.world_size, 1),
}


def call(
    parallel: ParallelConfig, kind: str, axis: str, elements: float, dtype: str, calls: float = 1
) -> Counts:
    """Return the counts of calls; nothing if a rank is alone on the axis.

    Args:
        kind: The kind, such as all_reduce.
        axis: A key of `AXES`.
        elements: The elements of the larger of a rank's input and output, in one call.
    """
    group = AXES[axis](parallel)
    if group.num_ranks == 1 or not calls:
        return NOTHING
    nbytes = calls * elements * dtype_bytes(dtype)
    return Counts(collectives=(CollectiveCount(kind, axis, *group, dtype, calls, nbytes),))
