"""The number of processes that compute on a node at the same time, from the plan."""

from __future__ import annotations

import pytest

from megarl.config.schema import (
    ActorConfig,
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RolloutConfig,
)
from megarl.plan.placement.dataflow import at_work
from megarl.plan.placement.plan import plan_placement

TP2 = ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("strategy", "values", "scores", "updates"),
    [
        # actor and reference in two processes, in addition to the critic's one
        (PlacementStrategy.split_collocate, 3, 3, (3, 3)),
        (PlacementStrategy.stand_alone, 5, 5, (3, 3)),
        (PlacementStrategy.fully_collocate, 1, 2, (1, 2)),
    ],
)
def test_side_by_side_they_share(
    strategy: PlacementStrategy, values: int, scores: int, updates: tuple[int, int]
) -> None:
    plan = plan_placement(
        PPOConfig(
            actor=TP2, rollout=RolloutConfig(num_replicas=2), placement=PlacementConfig(strategy=strategy)
        )
    )
    assert at_work(plan) == {
        "rollout": {"submit_and_poll": 2},
        "actor": {"log_probs": scores, "update": updates[1], "update_scored": updates[1]},
        "reference": {"log_probs": scores},
        "critic": {"values": values, "update": updates[0]},
    }


def test_alone_a_process_has_them_all() -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo))
    table = at_work(plan_placement(PPOConfig(algorithm=algorithm)))
    assert {number for methods in table.values() for number in methods.values()} == {1}


def test_of_the_fullest_node() -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo))
    actor = ActorConfig(parallel=ParallelConfig(data_parallel_size=4))
    placement = PlacementConfig(strategy=PlacementStrategy.hybrid, num_nodes=2, devices_per_node=2)
    assert (
        at_work(plan_placement(PPOConfig(algorithm=algorithm, actor=actor, placement=placement)))["actor"][
            "update"
        ]
        == 2
    )
