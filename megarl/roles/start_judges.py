"""Start the servers of judges that the run serves, and tell the reward worker where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.roles import ServedJudge, judge_roles
from megarl.config.schema import Device, ModelConfig, PPOConfig, RolloutConfig
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.controller.worker import RayClassWithInitArgs
from megarl.placement.placement_plan import PlacementPlan
from megarl.roles.start_rollout import replica_places
from megarl.workers.judge import JudgeSpec, JudgeWorker
from megarl.workers.reward import RewardWorker


def start_judges(
    config: PPOConfig, device: Device, plan: PlacementPlan, pools: ResourcePoolManager
) -> dict[str, list[RayWorkerGroup]]:
    """Start one group for each server, and return those of each judge by its name. Does not wait for them."""
    return {
        judge.settings.name: [
            RayWorkerGroup(
                place.pool,
                RayClassWithInitArgs(JudgeWorker, _spec(config, judge, device)),
                role=role,
                phase_time_limit_s=config.trainer.phase_time_limit_s,
                rank_environments=place.environments,
            )
            for place in replica_places(plan, device, pools, role)
        ]
        for role, judge in judge_roles(config).items()
    }


def connect_judges(judges: Mapping[str, Sequence[RoleGroup]], reward: RoleGroup) -> None:
    """Wait until all servers have started, and give their addresses to the reward worker."""
    if not judges:
        return
    asked = {name: [group.call(JudgeWorker.endpoint) for group in groups] for name, groups in judges.items()}
    endpoints = {name: [future.get() for future in futures] for name, futures in asked.items()}
    reward.call(RewardWorker.use_judges, endpoints)
    reward.drain_spans()  # the start is no part of the first step


def _spec(config: PPOConfig, judge: ServedJudge, device: Device) -> JudgeSpec:
    return JudgeSpec(
        key=judge.key,
        model=ModelConfig(
            path=judge.path, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
        ),
        rollout=RolloutConfig(
            tensor_parallel_size=judge.settings.tensor_parallel_size,
            max_concurrency=judge.settings.max_concurrency,
            restart_limit=config.rollout.restart_limit,
            restart_window_s=config.rollout.restart_window_s,
        ),
        device=device,
    )
