"""Start the servers of judges that the run serves, and tell the reward worker where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.config.roles import ServedJudge, judge_roles
from megarl.config.schema import Device, ModelConfig, PPOConfig, RolloutConfig
from megarl.controller.calls import Call
from megarl.controller.futures import WorkerFuture, has_ended
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.controller.worker import RayClassWithInitArgs
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.rewards.judge_client import JudgeEndpoint
from megarl.rewards.judge_worker import JudgeSpec, JudgeWorker
from megarl.rewards.reward_worker import RewardWorker
from megarl.rollout.driver.start_rollout import replica_places


class JudgeServers:
    """The servers of judges that the run serves.

    Args:
        of_judges: The group of each server by the name of its judge. A group has one process.
    """

    def __init__(self, of_judges: Mapping[str, Sequence[RayWorkerGroup]]) -> None:
        self._of_judges = of_judges
        self._endpoints: dict[RayWorkerGroup, JudgeEndpoint] = {}
        self._serving: dict[RayWorkerGroup, WorkerFuture[None]] = {}

    @property
    def groups(self) -> list[RayWorkerGroup]:
        return [group for groups in self._of_judges.values() for group in groups]

    @property
    def calls(self) -> tuple[Call, ...]:
        """A call for each server, which fails when its process or node is lost."""
        return tuple(call for future in self._serving.values() for call in future.calls)

    def lost(self) -> list[RayWorkerGroup]:
        """Return the groups that do not serve, because their process or node is lost."""
        for group, future in list(self._serving.items()):
            if has_ended(future.calls) or group.pool.lost_nodes():
                del self._serving[group]
        return [group for group in self.groups if group not in self._serving]

    def connect(self, group: RoleGroup) -> None:
        """Wait until all servers have started, and give their addresses to the reward worker.

        Raises:
            WorkerError: A server did not start, or a process is lost.
        """
        if not self.groups:
            return
        new = {
            server: server.call(JudgeWorker.endpoint) for server in self.groups if server not in self._serving
        }
        # One by one: a server that has started serves on if another one fails.
        for server, future in new.items():
            self._endpoints[server] = future.get()
            self._serving[server] = server.call(JudgeWorker.serve)
        endpoints = {
            name: [self._endpoints[server] for server in servers] for name, servers in self._of_judges.items()
        }
        group.call(RewardWorker.use_judges, endpoints)
        group.drain_spans()  # the start is no part of a step


def start_judges(
    config: PPOConfig, device: Device, plan: PlacementPlan, pools: ResourcePoolManager
) -> JudgeServers:
    """Start one group for each server. Does not wait for them."""
    return JudgeServers(
        {
            judge.settings.name: [
                RayWorkerGroup(
                    place.pool,
                    RayClassWithInitArgs(JudgeWorker, _spec(config, judge, device)),
                    role=role,
                    phase_time_limit_s=config.trainer.phase_time_limit_s,
                )
                for place in replica_places(plan, device, pools, role)
            ]
            for role, judge in judge_roles(config).items()
        }
    )


def _spec(config: PPOConfig, judge: ServedJudge, device: Device) -> JudgeSpec:
    return JudgeSpec(
        key=judge.key,
        model=ModelConfig(
            path=judge.path, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
        ),
        template_arguments=judge.settings.request.get("chat_template_kwargs") or {},
        rollout=RolloutConfig(
            tensor_parallel_size=judge.settings.tensor_parallel_size,
            max_concurrency=judge.settings.max_concurrency,
            restart_limit=config.rollout.restart_limit,
            restart_window_s=config.rollout.restart_window_s,
        ),
        device=device,
    )
