"""Megatron trains over the emulation of NCCL as it does over gloo, bitwise identical.

No order of its calls relies on what gloo tolerates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import OptimConfig, ParallelConfig
from tests.nccl_communicator import num_live_communicators
from tests.nccl_semantics import BACKEND, NcclSemantics, register
from tests.ranks import RankPool
from tests.unit.engine.models import make_batch, save_model
from tests.unit.engine.rank_side import ALL_LAYOUTS, build, deal, replica_rows, start, take

NUM_ROWS = 4
NUM_STEPS = 2


class Trained(NamedTuple):
    losses: list[float]  # one per micro-batch, on the last stage
    grad_norms: list[float]
    parameters: str  # sha256 of this rank's parameters
    num_pair_communicators: int  # in all groups; 0 over gloo


def change_default_group(backend: str, rendezvous: str) -> None:
    """Replace the default group, and end all others together: gloo's connection setup fails if a peer leaves early."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    dist.barrier()


def run_steps(parallel: ParallelConfig, folder: str, backend: str, rendezvous: str) -> Trained:
    """Run in a rank: run steps. The rank has the pool's default group before, and an equal one afterwards."""
    register()
    change_default_group(backend, rendezvous)
    groups = start(parallel)
    engine = build(groups, folder, optim=OptimConfig(lr=1e-3))
    batch = take(make_batch(NUM_ROWS), replica_rows(groups, NUM_ROWS))
    micro_batches = deal(len(batch["prompts"]), 2)
    losses: list[float] = []

    def negative_log_likelihood(
        outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Any]]:
        loss = -outputs["log_probs"].sum()
        losses.append(float(loss.detach()))
        return loss, {}

    grad_norms = []
    for _ in range(NUM_STEPS):
        engine.forward_backward(batch, micro_batches, negative_log_likelihood)
        grad_norms.append(engine.step().grad_norm)

    digest = hashlib.sha256()
    for _, parameter in sorted(engine.parameters().items()):
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    made = [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, NcclSemantics)]
    assert bool(made) == (backend == BACKEND)
    change_default_group("gloo", rendezvous + "-after")
    assert num_live_communicators() == 0

    return Trained(
        losses, grad_norms, digest.hexdigest(), sum(group.num_pair_communicators for group in made)
    )


@pytest.mark.parametrize(
    ("layout", "has_pairs"), [("TP2xPP2", False), ("CP2xPP2", False), ("PP2xVPP2", True)]
)
def test_steps_are_those_over_gloo(layout: str, has_pairs: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    """Between virtual stages, Megatron sends without coalescing."""
    parallel = ALL_LAYOUTS[layout]
    save_model("qwen2-tied", tmp_path / "lm")
    over_gloo, with_semantics = (
        rank_pool.run(
            run_steps,
            world_size=parallel.world_size,
            parallel=parallel,
            folder=str(tmp_path / "lm"),
            backend=backend,
            rendezvous=str(tmp_path / backend),
        )
        for backend in ("gloo", BACKEND)
    )
    assert [rank._replace(num_pair_communicators=0) for rank in with_semantics] == over_gloo
    assert any(rank.num_pair_communicators for rank in with_semantics) == has_pairs
    assert len({rank.parameters for rank in over_gloo}) > 1
    assert sum(len(rank.losses) for rank in over_gloo) > 0
