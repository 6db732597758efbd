"""Test the locations of replicas: their bundles in their own or the actor's pool, and the GPUs that their
processes see."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.schema import (
    ActorConfig,
    Device,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RolloutConfig,
)
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.plan.placement.plan import plan_placement
from megarl.rollout.driver.start_rollout import replica_places
from megarl.weights.plan import RankLocation
from megarl.weights.sync.forecast import rank_places


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes see GPUs in an order that Ray chooses."""
    monkeypatch.setattr(
        "megarl.rollout.driver.start_rollout.visible_gpus",
        lambda pool: ["6", "1", "0", "3"][: pool.world_size],
    )


def places(strategy: PlacementStrategy, tensor_parallel_size: int, device: Device) -> list[Any]:
    config = PPOConfig(
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)),
        rollout=RolloutConfig(num_replicas=2, tensor_parallel_size=tensor_parallel_size),
        placement=PlacementConfig(strategy=strategy),
    )
    plan = plan_placement(config)
    pools = ResourcePoolManager(
        plan.process_on_nodes,
        plan.role_pools,
        device is Device.cuda,
        plan.devices_per_process,
        plan.colocate_counts,
    )
    found = replica_places(plan, device, pools)

    return [
        (place.pool.ranks[0], place.pool.name, place.pool.resources_per_process(), [*place.environments])
        for place in found
    ]  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", [Device.cpu, Device.cuda])
def test_engines_of_one_device_have_what_ray_gives_them(device: Device) -> None:
    gpu = {"GPU": 1} if device is Device.cuda else {}
    assert places(PlacementStrategy.hybrid, 1, device) == [
        (rank, "actor", {"CPU": 2, **gpu}, []) for rank in range(2)
    ]
    assert places(PlacementStrategy.split_collocate, 1, device) == [
        (rank, "rollout", {"CPU": 1, **gpu}, []) for rank in range(2)
    ]


def test_engines_on_several_bundles_of_the_actor_see_all_their_gpus() -> None:
    assert places(PlacementStrategy.hybrid, 2, Device.cuda) == [
        (0, "actor", {"CPU": 2, "GPU": 1}, [{"CUDA_VISIBLE_DEVICES": "6,1"}]),
        (2, "actor", {"CPU": 2, "GPU": 1}, [{"CUDA_VISIBLE_DEVICES": "0,3"}]),
    ]
    assert [place[0] for place in places(PlacementStrategy.hybrid, 2, Device.cpu)] == [0, 2]


def test_engines_with_a_pool_of_their_own_reserve_all_their_gpus() -> None:
    assert places(PlacementStrategy.split_collocate, 2, Device.cuda) == [
        (rank, "rollout", {"CPU": 1, "GPU": 2}, []) for rank in range(2)
    ]


def test_an_engine_over_two_nodes_has_a_process_on_each_with_the_gpus_of_its_node() -> None:
    config = PPOConfig(
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)),
        rollout=RolloutConfig(num_replicas=1, tensor_parallel_size=4),
        placement=PlacementConfig(strategy=PlacementStrategy.hybrid, num_nodes=3, devices_per_node=2),
    )
    plan = plan_placement(config)
    pools = ResourcePoolManager.of_plan(plan, use_gpu=True)
    (place,) = replica_places(plan, Device.cuda, pools)
    assert place.pool.ranks == (0, 2)  # type: ignore[attr-defined]
    assert place.pool.process_on_nodes == (1, 1)
    assert [*place.environments] == [{"CUDA_VISIBLE_DEVICES": "6,1"}, {"CUDA_VISIBLE_DEVICES": "0,3"}]
    assert rank_places(plan, "rollout") == [
        [RankLocation(str(node), f"{node}:{device}") for node in (0, 1) for device in (0, 1)]
    ]
