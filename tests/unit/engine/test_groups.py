"""Megatron's process groups."""

from __future__ import annotations

from datetime import timedelta

import torch

from megarl.config.schema import ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.rank_side import start


def limits(parallel: ParallelConfig) -> list[timedelta]:
    """Run in a rank: return the time limit of each group."""
    start(parallel)
    from megarl.engine import groups

    made = groups.initialize(parallel, seed=0, limit_s=90.0)

    return [
        group._get_backend(torch.device("cpu")).options._timeout
        for group in (made.tensor, made.pipeline, made.data)
    ]


def test_a_collective_waits_as_long_as_it_is_told(rank_pool: RankPool) -> None:
    """Megatron counts in whole minutes."""
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert rank_pool.run(limits, world_size=4, parallel=parallel) == [[timedelta(minutes=2)] * 3] * 4
