"""Start a run's worker groups, with workers that only report their location, on a simulated cluster of 4
nodes with 2 devices each.

Ray has one cluster per process, so this is a separate program: `python -m
tests.integration.simulated_cluster` prints as JSON, for each strategy, where the plan places each process and
where it is: [[group, rank, node of the plan, devices, Ray's node, its devices]].
"""

from __future__ import annotations

import json
import os
from typing import Any

from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    Device,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RolloutConfig,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.environment import daemon_settings
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import InsufficientResourcesError, ResourcePoolManager
from megarl.controller.worker import RayClassWithInitArgs
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan
from megarl.plan.placement.plan import plan_placement
from megarl.roles.start import group_pool
from tests.integration.started_cluster import started_cluster
from tests.integration.where_worker import WhereWorker

NUM_NODES = 4
DEVICES_PER_NODE = 2
STRATEGIES = (PlacementStrategy.split_collocate, PlacementStrategy.fully_collocate, PlacementStrategy.custom)


def config(strategy: PlacementStrategy, num_nodes: int = NUM_NODES, data_parallel_size: int = 2) -> PPOConfig:
    pools = {"one": [1, 2, 1], "two": [0, 0, 1, 1]}
    roles = {"actor": "two", "reference": "two", "critic": "one", "rollout": "one"}
    custom = {"pools": pools, "roles": roles} if strategy is PlacementStrategy.custom else {}
    stands_alone = strategy is PlacementStrategy.stand_alone
    tensor, data = (1, 2) if custom else (2, 1 if stands_alone else data_parallel_size)

    return PPOConfig(
        actor=ActorConfig(parallel=ParallelConfig(tensor_parallel_size=tensor, data_parallel_size=data)),
        critic=CriticConfig(parallel=ParallelConfig(pipeline_parallel_size=2)),
        rollout=RolloutConfig(num_replicas=2),
        placement=PlacementConfig(
            strategy=strategy, num_nodes=num_nodes, devices_per_node=DEVICES_PER_NODE, **custom
        ),  # type: ignore[arg-type]
        device=Device.cpu,
    )


def found(plan: PlacementPlan, pools: ResourcePoolManager, group: GroupPlan) -> list[list[Any]]:
    """Return the locations of one group, whose processes end afterwards: a small machine cannot hold all
    groups at once."""
    workers = RayWorkerGroup(
        group_pool(plan, pools, group), RayClassWithInitArgs(WhereWorker), role=group.name
    )
    try:
        places = workers.call(WhereWorker.where)
    finally:
        workers.shutdown()

    return [
        [group.name, process.rank, process.node, list(process.devices), node, gpus]
        for process, (node, gpus) in zip(group.processes, places, strict=True)
    ]


def pools_of(plan: PlacementPlan) -> ResourcePoolManager:
    return ResourcePoolManager(
        plan.process_on_nodes,
        plan.role_pools,
        use_gpu=True,
        gpus_per_process=plan.devices_per_process,
        max_colocate_counts=plan.colocate_counts,
        nodes=plan.nodes,
    )


def main() -> None:
    os.environ.update(daemon_settings())
    cluster, _ = started_cluster(*[{"num_cpus": 8, "num_gpus": DEVICES_PER_NODE}] * NUM_NODES)
    os.environ["RAY_ADDRESS"] = cluster.address
    start_ray(num_cpus=1)
    results: dict[str, Any] = {}

    try:
        for strategy in STRATEGIES:
            plan = plan_placement(config(strategy))
            pools = pools_of(plan)
            pools.create_resource_pool()
            results[strategy.value] = [row for group in plan.groups for row in found(plan, pools, group)]
            pools.release()
        try:
            pools_of(
                plan_placement(config(PlacementStrategy.split_collocate, NUM_NODES + 1, 3))
            ).create_resource_pool()
        except InsufficientResourcesError as error:
            results["too_large"] = str(error)
    finally:
        shutdown()
        cluster.shutdown()

    print(json.dumps(results))


if __name__ == "__main__":
    main()
