"""Megatron's process groups. The only file that reads `megatron.core.parallel_state`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megarl.config.schema import ParallelConfig
from megarl.machine.errors import counted


@dataclass(frozen=True, kw_only=True)
class ParallelGroups:
    """The groups of this rank and its position in them.

    A stage is a pipeline rank; a chunk is a virtual pipeline stage on this rank.

    Attributes:
        tensor: The tensor-parallel group.
        pipeline: The pipeline-parallel group.
        context: The ranks that share the tokens of each row.
        data_context: The ranks with equal parameters, which sum gradients and shard the optimizer state.
        stage: The ranks that hold the same layers.
        expert_data: The ranks that hold the same parts of the same experts.
        expert_rank: Which of the stage's experts this rank holds.
    """

    parallel: ParallelConfig
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    data_context: dist.ProcessGroup
    stage: dist.ProcessGroup
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    data_rank: int
    expert_data: dist.ProcessGroup
    expert_rank: int

    @property
    def rank(self) -> int:
        """The rank among all ranks of the layout, in Megatron's order."""
        parallel = self.parallel

        # Tensor parallelism varies fastest, followed by context, data and pipeline parallelism.
        part = self.pipeline_rank * parallel.data_parallel_size + self.data_rank
        part = part * parallel.context_parallel_size + self.context_rank
        return part * parallel.tensor_parallel_size + self.tensor_rank

    def own_part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of values of tokens, of which each sequence-parallel rank has a part."""
        if not self.parallel.sequence_parallel:
            return tokens
        return tokens.chunk(self.parallel.tensor_parallel_size)[self.tensor_rank]

    @property
    def num_chunks(self) -> int:
        return self.parallel.virtual_pipeline_parallel_size or 1

    def is_first_stage(self, chunk: int) -> bool:
        return self.pipeline_rank == 0 and chunk == 0

    def is_last_stage(self, chunk: int) -> bool:
        return self.holds_last_stage and chunk == self.num_chunks - 1

    @property
    def holds_last_stage(self) -> bool:
        return self.pipeline_rank == self.parallel.pipeline_parallel_size - 1


def initialize(parallel: ParallelConfig, seed: int, limit_s: float = 1800.0) -> ParallelGroups:
    """Create every group on all ranks, in Megatron's single global order (tp, then cp, then dp, then pp).

    Roles in one process share the groups.

    Args:
        seed: The seed of the random number generators.
        limit_s: The time limit of each collective, in seconds.

    Raises:
        ValueError: The world size differs from the layout.
    """
    if dist.get_world_size() != parallel.world_size:
        raise ValueError(
            f"the layout {parallel} needs {counted(parallel.world_size, 'rank')}, but the process group has "
            f"{dist.get_world_size()}: tensor x context x pipeline x data must equal the number of ranks"
        )

    # Megatron's groups are global to the process, so those of an earlier call are destroyed first.
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=ceil(limit_s / 60),
    )

    _seed_generators(seed)

    state: Any = parallel_state  # its groups are declared as None
    return ParallelGroups(
        parallel=parallel,
        tensor=state.get_tensor_model_parallel_group(),
        pipeline=state.get_pipeline_model_parallel_group(),
        context=state.get_context_parallel_group(),
        data=state.get_data_parallel_group(),
        data_context=state.get_data_parallel_group(with_context_parallel=True),
        stage=state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert_data=state.get_expert_data_parallel_group(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
    )


def _seed_generators(seed: int) -> None:
    """Seed the generators of torch, of Megatron, of numpy and of Python.

    megarl draws from none of the last two, but code of a user in a rank may. Ranks of a context-parallel
    group share their seed, because a checkpoint stores one state for all of them.
    """
    # Megatron seeds the generators of the GPU only, and its tracker of tensor-parallel generators.
    torch.default_generator.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)

    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    for_numpy, for_python = np.random.SeedSequence([seed, *place]).spawn(2)
    np.random.seed(for_numpy.generate_state(4))
    random.seed(for_python.generate_state(4).tobytes())
