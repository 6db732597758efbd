"""Test training over two and over eight GPUs, with distributed experts, against one GPU.

tests/soak/test_rehearsed_gpu_ranks.py runs these tests on a CPU, over gloo, so that they stay valid.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.config.layers import has_transformer_engine
from megarl.config.schema import Device, Layers, OptimConfig, ParallelConfig
from megarl.engine import platform
from tests.unit.engine.checkpoint_side import train
from tests.unit.engine.models import save_model
from tests.unit.engine.rank_side import build

NUM_STEPS = 3
_SEQUENCE = {"tensor_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = {
    "TP2+SPxEP2": ParallelConfig(**_SEQUENCE, expert_parallel_size=2),
    "DP2xEP2": ParallelConfig(data_parallel_size=2, expert_parallel_size=2),
    "TP2+SPxDP4xEP8": ParallelConfig(**_SEQUENCE, data_parallel_size=4, expert_parallel_size=8),
    "TP2+SPxPP2xDP2xEP4": ParallelConfig(
        **_SEQUENCE, pipeline_parallel_size=2, data_parallel_size=2, expert_parallel_size=4
    ),
}
# Relative differences. In bfloat16 each layout rounds other sums, also of the weights that a step changes.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}

Trained = tuple[list[float], list[float]]  # losses, and norms of gradients


@pytest.fixture
def most_ranks(device: torch.device) -> int:
    return torch.cuda.device_count()


@pytest.fixture(params=[f"{name}-{layout.world_size}" for name, layout in LAYOUTS.items()])
def parallel(request: pytest.FixtureRequest, most_ranks: int) -> ParallelConfig:
    layout = LAYOUTS[request.param.rpartition("-")[0]]
    if layout.world_size > most_ranks:
        pytest.skip(f"needs {layout.world_size} GPUs, and torch sees {most_ranks}")
    return layout


def run_ranks(
    folder: Path, parallel: ParallelConfig, device: torch.device, dtype: torch.dtype, layers: Layers
) -> Trained:
    """Train in new processes, and return what the first one reports, which is the same on each."""
    store = folder / f"store_{parallel.world_size}"
    with ProcessPoolExecutor(parallel.world_size, mp_context=get_context("spawn")) as pool:
        ranks = [
            pool.submit(run_rank, rank, str(folder), str(store), parallel, device.type, dtype, layers)
            for rank in range(parallel.world_size)
        ]
        first, *others = [rank.result() for rank in ranks]
    assert all(other == first for other in others)
    return first


def run_rank(
    rank: int,
    folder: str,
    store: str,
    parallel: ParallelConfig,
    device: str,
    dtype: torch.dtype,
    layers: Layers,
) -> Trained:
    """Run in a process."""
    os.environ["LOCAL_RANK"] = str(rank)
    active = platform.activate(Device(device))
    dist.init_process_group(
        active.distributed_backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=parallel.world_size,
    )
    from megarl.engine import groups as engine_groups

    groups = engine_groups.initialize(parallel, seed=0)
    engine = build(groups, folder, dtype=dtype, layers=layers, optim=OptimConfig(lr=1e-3))
    steps = train(engine, NUM_STEPS)
    dist.destroy_process_group()
    return steps.losses, [norm for norm, _ in steps.statistics]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ranks_with_some_of_the_experts_train_like_one_rank(
    dtype: torch.dtype,
    parallel: ParallelConfig,
    device: torch.device,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    save_model("qwen3_moe-all", tmp_path)
    is_fused = device.type == "cuda" and dtype is torch.bfloat16 and has_transformer_engine()
    layers = Layers.transformer_engine if is_fused else Layers.local
    got, want = (run_ranks(tmp_path, each, device, dtype, layers) for each in (parallel, ParallelConfig()))
    differences = []
    for mine, theirs in zip(got, want, strict=True):
        differences += [abs(one - other) / abs(other) for one, other in zip(mine, theirs, strict=True)]
    record_property(f"{layers.value}: largest difference of losses and norms", f"{max(differences):.1e}")
    assert max(differences) < TOLERANCE[dtype], (got, want)
    # Training has changed something, or equal numbers would mean nothing.
    assert want[0][0] != pytest.approx(want[0][-1], rel=1e-3)
