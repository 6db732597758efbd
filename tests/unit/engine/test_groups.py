"""Megatron's process groups."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

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


def new_gloo_threads() -> int:
    """Run in a rank: count the threads of gloo devices that more groups need."""
    before = len(gloo_threads())
    groups = [dist.new_group() for _ in range(4)]
    for group in groups:
        dist.barrier(group)

    return len(gloo_threads()) - before


def gloo_threads() -> list[int]:
    threads = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            if (thread / "comm").read_text().strip() == "gloo_tcp_loop":
                threads.append(int(thread.name))
    return threads


def test_all_groups_of_a_rank_share_one_gloo_device(rank_pool: RankPool) -> None:
    assert rank_pool.run(new_gloo_threads, world_size=2) == [0, 0]


def lowered_priorities() -> tuple[int, set[int]]:
    """Run in a rank: return its priority, and those of its gloo devices' threads relative to it."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    return own, {os.getpriority(os.PRIO_PROCESS, thread) - own for thread in gloo_threads()}


def test_only_the_thread_of_the_gloo_device_has_a_low_priority(rank_pool: RankPool) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert rank_pool.run(lowered_priorities, world_size=2) == [(own, {min(10, 19 - own)})] * 2


def drawn(parallel: ParallelConfig) -> tuple[list[list[float]], list[list[float]]]:
    """Run in a rank: return numbers of each generator after two initializations, which others came before."""
    start(parallel)
    from megarl.engine import groups

    numbers = []
    for noise in (b"one", b"two"):
        random.seed(noise)
        np.random.seed(list(noise))
        torch.default_generator.seed()
        groups.initialize(parallel, seed=5)
        numbers.append([random.random(), float(np.random.random()), float(torch.rand(()))])
    groups.initialize(parallel, seed=6)
    return numbers, [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_each_rank_seeds_every_generator(rank_pool: RankPool) -> None:
    """A checkpoint stores one state for ranks that share rows, which are those of a context-parallel group."""
    ranks = rank_pool.run(
        drawn, world_size=4, parallel=ParallelConfig(context_parallel_size=2, data_parallel_size=2)
    )
    for (first, second), other in ranks:
        assert first == second
        assert all(number != another for number, another in zip(first, other, strict=True))
    by_seed = [first for (first, _), _ in ranks]
    assert by_seed[0] == by_seed[1]
    assert by_seed[2] == by_seed[3]
    assert all(by_seed[0][number] != by_seed[2][number] for number in (0, 1))
    assert by_seed[0][0] != by_seed[0][1]
