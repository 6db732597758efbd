"""Judges that the run serves: the process of a server, and the groups of all servers.

A process serves a judge's model with SGLang, and restarts the server if one of its processes ends. The reward
worker is told where the servers are.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.roles import ServedJudge, judge_roles
from megarl.config.schema import Device, ModelConfig, PPOConfig, RolloutConfig
from megarl.controller.calls import Call
from megarl.controller.dispatch import Dispatch
from megarl.controller.futures import WorkerFuture, has_ended
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.controller.restarts import RestartBudget
from megarl.controller.worker import RayClassWithInitArgs, Worker, register
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import opens_thinking
from megarl.machine.errors import EngineDeadError, RunError
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.rewards.judges import JudgeEndpoint
from megarl.rewards.reward_worker import RewardWorker
from megarl.rollout.driver.start_rollout import replica_places
from megarl.rollout.interface import RolloutEngineSpec

_LOOK_S = 0.5
_log = logging.getLogger(__name__)


class JudgeServerError(RunError):
    """The server of a judge did not start. The message has its last output."""

    hint = ("if it ran out of memory, use more devices per server (tensor_parallel_size of the judge)",)


class JudgeWorker(Worker):
    """Process that keeps one server of a judge running. Its URL and API key stay the same.

    While the server is down its clients wait. Without restarts left it stays down, so samples have no score.

    Args:
        key: The configuration key of the judge, for messages.
        engine: Its model, the size of its engine, and the limit of its restarts.
        template_arguments: Arguments of its chat template, which requests send.
    """

    def __init__(self, key: str, engine: RolloutEngineSpec, template_arguments: Mapping[str, Any]) -> None:
        super().__init__()
        # Imported here because only runs that serve judges need them.
        from megarl.rollout.sglang.server import ServerBackend
        from megarl.rollout.sglang.server_args import START_LIMIT_S, judge_server_args

        try:
            tokenizer = load_tokenizer(engine.model.path, engine.model.trust_remote_code)
            self._opens_thinking = opens_thinking(tokenizer, arguments=template_arguments)
        except ValueError as error:
            raise JudgeServerError(f"{key}: {error}") from error

        self._key = key
        self._backend = ServerBackend(judge_server_args(engine), os.environ["MASTER_ADDR"], START_LIMIT_S)
        self._budget = RestartBudget(engine.rollout.restart_limit)
        try:
            self._backend.start()
        except EngineDeadError as error:
            raise JudgeServerError(f"{key}: {error}") from error

        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="judge-server", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End the server."""
        self._closed.set()
        self._watcher.join()
        self._backend.stop()

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def endpoint(self) -> JudgeEndpoint:
        """Return the server's address, after it has started."""
        return JudgeEndpoint(f"{self._backend.url}/v1", self._backend.api_key, self._opens_thinking)

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def serve(self) -> None:
        """Return when the server is closed. The call fails when this process or its node is lost."""
        self._closed.wait()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if (why := self._backend.dead_process()) is not None and not self._restart(why):
                return

    def _restart(self, why: str) -> bool:
        """Restart the server as often as the budget allows. Returns whether it serves."""
        # The other processes of the server end too, so that clients with a request in progress notice.
        self._backend.stop()
        while self._budget.left:
            self._budget.spend()
            _log.warning(
                "%s: the server is restarted, restarts left: %d; %s", self._key, self._budget.left, why
            )
            try:
                self._backend.start()
            except EngineDeadError as error:
                why = str(error)
            else:
                return True

        _log.error("%s: %s; %s", self._key, self._budget.used_up(), why)
        return False


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
                    RayClassWithInitArgs(
                        JudgeWorker,
                        judge.key,
                        _engine_spec(config, judge, device),
                        judge.settings.request.get("chat_template_kwargs") or {},
                    ),
                    role=role,
                    phase_time_limit_s=config.trainer.phase_time_limit_s,
                )
                for place in replica_places(plan, device, pools, role)
            ]
            for role, judge in judge_roles(config).items()
        }
    )


def _engine_spec(config: PPOConfig, judge: ServedJudge, device: Device) -> RolloutEngineSpec:
    return RolloutEngineSpec(
        model=ModelConfig(
            path=judge.path, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
        ),
        rollout=RolloutConfig(
            tensor_parallel_size=judge.settings.tensor_parallel_size,
            max_concurrency=judge.settings.max_concurrency,
            restart_limit=config.rollout.restart_limit,
        ),
        device=device,
    )
