"""Test that the mesh computed by the driver matches the positions of Megatron's ranks."""

from __future__ import annotations

import pytest

from megarl.config.schema import ParallelConfig
from megarl.roles.megatron_worker import megatron_mesh
from tests.ranks import RankPool
from tests.unit.engine.rank_side import CONTEXT_LAYOUTS, LAYOUTS, MIXED_LAYOUTS, start

CONTEXT = {name: CONTEXT_LAYOUTS[name] for name in ("CP2xTP2+SP", "CP2xPP2", "CP2xDP2")}
ALL = {
    **LAYOUTS,
    **MIXED_LAYOUTS,
    **CONTEXT,
    "TP2xDP2": ParallelConfig(tensor_parallel_size=2, data_parallel_size=2),
}


def place_in_rank(parallel: ParallelConfig) -> tuple[int, ...]:
    groups = start(parallel)
    return groups.data_rank, groups.tensor_rank, groups.pipeline_rank, groups.context_rank


@pytest.mark.parametrize("layout", ALL)
def test_it_is_megatrons(rank_pool: RankPool, layout: str) -> None:
    found = rank_pool.run(place_in_rank, world_size=ALL[layout].world_size, parallel=ALL[layout])
    assert [tuple(place) for place in megatron_mesh(ALL[layout])] == found


def test_three_axes() -> None:
    """Worked out by hand: with tp=2, dp=2, pp=2, rank 5 is tp 1 of replica 0 in stage 1."""
    mesh = megatron_mesh(
        ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    )
    assert [tuple(place) for place in (mesh[1], mesh[2], mesh[5])] == [
        (0, 1, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 1, 0),
    ]
