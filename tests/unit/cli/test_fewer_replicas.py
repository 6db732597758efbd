"""Test with how many replicas a run continues after the loss of a node."""

from __future__ import annotations

import pytest

from megarl.cli.run.resumption import on_fewer_nodes
from megarl.config.load import load_config, plain_values
from megarl.config.schema import (
    ActorConfig,
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PlacementConfig,
    PPOConfig,
    SFTConfig,
    SourceTeacherConfig,
)


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


def test_teachers_of_data_sources_keep_their_number_of_replicas_per_node() -> None:
    """All other keys of a teacher stay, and its path does not depend on the folder."""
    teachers = [
        SourceTeacherConfig(
            name=name,
            path=f"teachers/{name}",
            data_sources=[name, "a 'quoted' one"],
            parallel=ParallelConfig(data_parallel_size=replicas, tensor_parallel_size=2),
        )
        for name, replicas in (("math", 2), ("code", 4))
    ]
    config = PPOConfig(
        model=ModelConfig(path="policy"),
        data=DataConfig(train_files=["prompts.parquet"]),
        algorithm=AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.distillation)),
        actor=ActorConfig(parallel=ParallelConfig(data_parallel_size=4)),
        teachers=teachers,
        placement=PlacementConfig(num_nodes=2),
    )
    overrides = on_fewer_nodes(config)
    assert overrides is not None
    before = plain_values(config)
    smaller = plain_values(load_config(PPOConfig, before, overrides))
    assert smaller["placement"]["num_nodes"] == 1
    assert smaller["actor"]["parallel"]["data_parallel_size"] == 2
    assert [teacher["parallel"].pop("data_parallel_size") for teacher in smaller["teachers"]] == [1, 2]
    for teacher in before["teachers"]:
        del teacher["parallel"]["data_parallel_size"]
    assert smaller["teachers"] == before["teachers"]
