"""Overlapping communication of replicas, as on CUDA: the numbers are the same, and data is not read before it arrives.

gloo's collectives are delayed as long as possible: a started one runs only when it is awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.config.schema import ParallelConfig, Recomputation, Recompute
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import OPTIM, same
from tests.unit.engine.models import make_batch, save_critic, save_model
from tests.unit.engine.rank_side import (
    MIXED_LAYOUTS,
    Tensors,
    build,
    deal,
    replica_rows,
    start,
    take,
    unpadded,
)

# Other buckets give replicas other parts of the gradient, so its norm is summed in another order.
UNCLIPPED = replace(OPTIM, clip_grad=0.0)
BUCKET_ELEMENTS = 10_000  # for a model of 150,000: several buckets


class _Late:
    """A handle of a collective that runs when it is awaited."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def wait(self) -> None:
        for call in self.calls:
            call()


class _Counts(NamedTuple):
    begun: list[str]  # the asynchronous collectives


@contextmanager
def overlapped() -> Iterator[_Counts]:
    """Run in a rank: engines that are built within this block overlap, in small buckets."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    from megarl.engine import data_parallel

    real = (
        buffers._coalescing_manager,
        buffers.dist_all_gather_func,
        buffers.dist_reduce_scatter_func,
        data_parallel.DistributedDataParallelConfig,
        data_parallel.overlaps,
    )
    handles: list[_Late] = []
    counts = _Counts([])

    @contextmanager
    def coalescing(group: Any, async_ops: bool = False) -> Iterator[_Late]:
        handles.append(_Late())
        yield handles[-1]
        if not async_ops:
            handles[-1].wait()

    def late(name: str, collective: Callable[..., Any]) -> Callable[..., None]:
        def begin(*tensors: torch.Tensor, async_op: bool, **options: Any) -> None:
            counts.begun.extend([name] * async_op)
            handles[-1].calls.append(partial(collective, *tensors, async_op=False, **options))

        return begin

    buffers._coalescing_manager = coalescing
    buffers.dist_all_gather_func = late("gather", real[1])
    buffers.dist_reduce_scatter_func = late("reduce", real[2])
    data_parallel.DistributedDataParallelConfig = partial(real[3], bucket_size=BUCKET_ELEMENTS)
    data_parallel.overlaps = lambda parallel, on_cuda: True

    try:
        yield counts
    finally:
        buffers._coalescing_manager, buffers.dist_all_gather_func, buffers.dist_reduce_scatter_func = real[:3]
        data_parallel.DistributedDataParallelConfig, data_parallel.overlaps = real[3:]


class Read(NamedTuple):
    """Readings of the parameters, each of them taken right after a step."""

    statistics: list[tuple[float, float]]
    named: Tensors
    stored: Tensors
    scores: Tensors
    moved: Tensors


def mean_square(
    outputs: Mapping[str, torch.Tensor], rows: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    values = outputs["values"] if "values" in outputs else outputs["log_probs"]
    return (values - 1).square().sum() / 40, {}


def train_and_read(parallel: ParallelConfig, folder: str, head: str, recompute: Recompute) -> Read:
    """Run in a rank: train and read the parameters."""
    engine = build(
        start(parallel),
        folder,
        head=head,
        optim=UNCLIPPED,
        recomputation=Recomputation(recompute),
        total_optimizer_steps=8,
    )
    from megarl.engine.offload import StatePart

    statistics = []

    def step(number: int) -> None:
        rows = replica_rows(engine.groups, 8)
        engine.forward_backward(take(make_batch(8, seed=number), rows), deal(len(rows), 2), mean_square)
        statistics.append(tuple(engine.step()))

    step(0)
    named = {name: value.clone() for name, value in engine.parameters().items()}
    step(1)
    places = engine.places
    stored = {
        str(number): places.host_copy(parameter, 0, parameter.numel())
        for number, parameter in enumerate(
            parameter for model in engine.models for parameter in model.parameters()
        )
    }
    step(2)
    scores = engine.forward(unpadded(make_batch(8)), deal(8, 2)) or {}
    step(3)
    engine.offload(StatePart.parameters)
    engine.restore(StatePart.parameters)
    moved = {name: value.clone() for name, value in engine.parameters().items()}
    step(4)

    return Read(statistics, named, stored, {key: column.padded() for key, column in scores.items()}, moved)


def train_overlapped(**arguments: Any) -> tuple[Read, list[str]]:
    start(arguments["parallel"])
    with overlapped() as counts:
        read = train_and_read(**arguments)
    return read, counts.begun


@pytest.mark.parametrize(
    ("layout", "head", "recompute"),
    [
        ("DP2", "lm", Recompute.none),
        ("PP2xDP2", "lm", Recompute.full),
        ("TP2+SPxDP2", "value", Recompute.selective),
        ("PP2xVPP2xDP2", "lm", Recompute.none),
    ],
)
def test_overlap_changes_no_number(
    layout: str, head: str, recompute: Recompute, rank_pool: RankPool, tmp_path: Path
) -> None:
    save_model("qwen2-tied", tmp_path / "lm")
    save_critic(tmp_path / "lm", tmp_path / "value")
    layouts = {
        **MIXED_LAYOUTS,
        "DP2": ParallelConfig(data_parallel_size=2),
        "PP2xVPP2xDP2": ParallelConfig(
            pipeline_parallel_size=2, virtual_pipeline_parallel_size=2, data_parallel_size=2
        ),
    }
    parallel = layouts[layout]
    arguments: dict[str, Any] = {
        "parallel": parallel,
        "folder": str(tmp_path / head),
        "head": head,
        "recompute": recompute,
    }
    plain = rank_pool.run(train_and_read, world_size=parallel.world_size, **arguments)
    late = rank_pool.run(train_overlapped, world_size=parallel.world_size, **arguments)
    for _, begun in late:
        assert begun.count("reduce") == begun.count("gather") >= 5  # steps
    assert late[0][1].count("gather") > 2 * 5  # the first stage has more than two buckets
    reads = [read for read, _ in late]

    for one, other in zip(reads, plain, strict=True):
        for step, expected in zip(one.statistics, other.statistics, strict=True):
            assert step == pytest.approx(expected, rel=1e-6)

    for part in ("named", "stored", "scores", "moved"):
        assert same([getattr(read, part) for read in reads], [getattr(read, part) for read in plain]), part
