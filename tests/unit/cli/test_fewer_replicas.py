"""Test with how many replicas a run continues after the loss of a node."""

from __future__ import annotations

import pytest

from megarl.cli.run.fewer_replicas import on_fewer_nodes
from megarl.config.schema import ActorConfig, ParallelConfig, PlacementConfig, SFTConfig


@pytest.mark.parametrize(
    ("num_nodes", "replicas", "fewer"),
    [
        (4, 8, (3, 6)),
        (4, 4, (3, 3)),
        (4, 2, (2, 1)),  # a replica spans two nodes, so three would not hold a whole number
        (2, 1, None),
        (1, 8, None),
    ],
)
def test_each_node_keeps_its_number_of_replicas(
    num_nodes: int, replicas: int, fewer: tuple[int, int] | None
) -> None:
    config = SFTConfig(
        actor=ActorConfig(parallel=ParallelConfig(data_parallel_size=replicas)),
        placement=PlacementConfig(num_nodes=num_nodes),
    )
    assert on_fewer_nodes(config) == (
        None
        if fewer is None
        else [f"placement.num_nodes={fewer[0]}", f"actor.parallel.data_parallel_size={fewer[1]}"]
    )
