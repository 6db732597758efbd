"""Start the inference engines of a run, build the rollout role on top of them, and scale a running job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import batched
from pathlib import Path

from megarl.agents.episode import EpisodeLimits
from megarl.config.roles import ENVIRONMENT
from megarl.config.schema import Device, PPOConfig, RoutingReplay
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import (
    InsufficientResourcesError,
    RayResourcePool,
    ResourcePoolManager,
    check_fits,
)
from megarl.controller.restarts import node_wait_s
from megarl.controller.worker import RayClassWithInitArgs, Worker
from megarl.models.architecture import LoRA
from megarl.plan.placement.dataflow import at_work
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.rollout_weights import RolloutWeights
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.engines import build_engine
from megarl.rollout.episodes.environments import Environments
from megarl.rollout.episodes.episode_runner import SessionRunner, TurnRunner
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.worker.environment import EnvironmentWorker
from megarl.tracking.run_files import take_request
from megarl.weights.plan import RankLocation
from megarl.weights.sync.forecast import rank_places
from megarl.weights.sync.sync import WeightSync

_log = logging.getLogger(__name__)
_ROOM_LIMIT_S = 10.0  # how long a joining replica waits for free devices
# A hung engine detects this itself and reports why. Its process is killed only if it does not.
_ANSWER_GRACE_S = 30.0


def replica_places(
    plan: PlacementPlan, device: Device, pools: ResourcePoolManager, role: str = "rollout"
) -> list[ReplicaPlace]:
    """Return the location of each replica of the rollout, or of each server of a judge.

    It has, on each node of the replica, the bundle of the first device there, and the names of all devices
    there if they span several bundles.
    """
    bundles = plan.bundles(role)
    pool = pools.get_resource_pool(role)
    engines = list(batched(bundles, plan.group_of(role).nodes_per_engine))
    parts = [pool.part([numbers[0] for numbers in engine]) for engine in engines]
    if device is not Device.cuda or all(len(numbers) == 1 for numbers in bundles):
        return [ReplicaPlace(part) for part in parts]

    # Ray shows a process only the GPUs of its own bundle, so an engine that spans several bundles needs all
    # names.
    gpus = dict(enumerate(visible_gpus(pool)))

    return [
        ReplicaPlace(part, _environments(gpus, engine), partial(_find_environments, pool, engine))
        for part, engine in zip(parts, engines, strict=True)
    ]


def _find_environments(pool: RayResourcePool, engine: Sequence[tuple[int, ...]]) -> list[dict[str, str]]:
    numbers = [number for on_node in engine for number in on_node]
    return _environments(dict(zip(numbers, visible_gpus(pool.part(numbers)), strict=True)), engine)


def _environments(gpus: Mapping[int, str], engine: Sequence[tuple[int, ...]]) -> list[dict[str, str]]:
    """Return the variables of an engine's process on each node.

    Args:
        gpus: The name of the GPU of each bundle.
        engine: The numbers of the engine's bundles on each node.
    """
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[number] for number in on_node)} for on_node in engine]


def visible_gpus(pool: RayResourcePool) -> list[str]:
    """Return the GPUs of each bundle as Ray shows them to a process there. The processes are ended."""
    probes = RayWorkerGroup(pool, RayClassWithInitArgs(Worker), role="probe")
    try:
        return probes.call(Worker.visible_gpus)
    finally:
        probes.shutdown()


def start_replicas(
    config: PPOConfig,
    device: Device,
    plan: PlacementPlan,
    pools: ResourcePoolManager,
    takes_turns: bool,
    lora: LoRA | None = None,
) -> Replicas:
    """Start the replicas.

    Args:
        config: The configuration.
        device: The device.
        plan: The placement.
        pools: The pools of the placement.
        takes_turns: Whether the replicas share their devices with other roles.
        lora: The adapters that they get separately, if any.
    """
    spec = RolloutEngineSpec(
        model=config.model,
        rollout=config.rollout,
        device=device,
        release_memory=takes_turns,
        returns_routes=config.engine.routing_replay is RoutingReplay.rollout,
        fp32_lm_head=config.engine.fp32_lm_head,
        lora=lora,
    )

    return Replicas(
        replica_places(plan, device, pools),
        partial(build_engine, spec),
        restart_limit=config.rollout.restart_limit,
        phase_time_limit_s=config.trainer.phase_time_limit_s,
        at_work=at_work(plan),
        wait_for_node_s=node_wait_s(config.recovery),
    )


def replica_scaling(
    config: PPOConfig,
    device: Device,
    plan: PlacementPlan,
    pools: ResourcePoolManager,
    replicas: Replicas,
    rollout: Rollout,
    sync: WeightSync,
) -> ReplicaScaling:
    planned = list(zip(replicas.places, rank_places(plan, "rollout"), strict=True))
    size = config.rollout.devices_per_engine
    num_nodes = plan.group_of("rollout").nodes_per_engine

    # Pools for replicas beyond the plan are reserved only on request.
    def reserve(number: int) -> RayResourcePool:
        return RayResourcePool(
            [1] * num_nodes,
            device is Device.cuda,
            f"rollout-{number}",
            wait_limit_s=_ROOM_LIMIT_S,
            gpus_per_process=size // num_nodes if device is Device.cuda else 1,
        )

    return ReplicaScaling(replicas, rollout.scheduler, sync, planned, reserve, size)


def start_rollout(
    config: PPOConfig,
    plan: PlacementPlan,
    pools: ResourcePoolManager,
    replicas: Replicas,
    weights: RolloutWeights,
    rules: TokenRules,
) -> Rollout:
    """Build the rollout role. With an agent, its samples are episodes."""
    agent = config.agent
    seed = config.trainer.seed
    limit_s = config.trainer.phase_time_limit_s
    answers_meanwhile = config.rollout.engine.needs.answers_meanwhile
    scheduler = RequestScheduler(
        replicas,
        weights.readmit,
        max_concurrency=config.rollout.max_concurrency,
        answer_limit_s=config.rollout.health_limit_s + _ANSWER_GRACE_S if answers_meanwhile else limit_s,
        sample_limit_s=limit_s,
        can_readmit=weights.can_readmit,
    )

    if not agent.is_used:
        routes_of = config.rollout.training if config.engine.routing_replay is RoutingReplay.rollout else None
        return Rollout(scheduler, weights, rules, seed, routes_of)

    # Start one environment process per bundle.
    pool = pools.get_resource_pool(ENVIRONMENT)
    environments = Environments(
        [pool.part([number]) for (number,) in plan.bundles(ENVIRONMENT)],
        RayClassWithInitArgs(
            EnvironmentWorker,
            agent,
            config.model.path,
            config.model.trust_remote_code,
            rules.chat_time,
            config.max_row_tokens,
        ),
        restart_limit=config.rollout.restart_limit,
        hang_limit_s=(agent.harness.time_limit_s if agent.has_program else agent.time_limit_s)
        + _ANSWER_GRACE_S,
        phase_time_limit_s=limit_s,
        wait_for_node_s=node_wait_s(config.recovery),
    )

    # The token limit covers all turns together, including the environment's answers.
    of_episodes = EpisodeLimits(
        max_turns=agent.max_turns,
        max_tokens=rules.max_response_length,
        max_turn_tokens=agent.max_turn_tokens,
        max_attempts=agent.max_attempts,
    )

    # The requests of agent programs name the tokens themselves.
    runner = SessionRunner if agent.has_program else TurnRunner

    return Rollout(scheduler, weights, rules, seed, episodes=runner(scheduler, environments, of_episodes))


# ---- replicas that join and leave a running job

# A replica of the placement plan, and the locations of its engine's ranks.
PlannedReplica = tuple[ReplicaPlace, Sequence[RankLocation]]


class ReplicaScaling:
    """Scales the replicas of a run whose engines have their own devices.

    Args:
        scheduler: Request scheduler, which is notified of the change.
        sync: Weight sync, which is notified of the replicas' locations.
        planned: Initial replicas, whose devices stay reserved.
        reserve: Returns a pool of one process with the devices of an engine, given the replica's number.
        num_ranks: Number of ranks of an engine.
    """

    def __init__(
        self,
        replicas: Replicas,
        scheduler: RequestScheduler,
        sync: WeightSync,
        planned: Sequence[PlannedReplica],
        reserve: Callable[[int], RayResourcePool],
        num_ranks: int,
    ) -> None:
        self._replicas = replicas
        self._scheduler = scheduler
        self._sync = sync
        self._planned = planned
        self._reserve = reserve
        self._num_ranks = num_ranks
        self._pools: list[RayResourcePool] = []  # the pools of replicas beyond the planned ones

    def scale(self, count: int) -> None:
        """Change the number of replicas to `count`.

        New replicas are still starting when this returns, while the others generate; each gets the current
        weights before its first request. Replicas with the highest numbers leave, and their requests go to
        the others.

        Raises:
            InsufficientResourcesError: The cluster has no free devices. Nothing has changed.
        """
        # Reserve all devices before anything changes, so that a refusal leaves the run as it was.
        reserved = [
            self._reserve(number) for number in range(max(len(self._planned), len(self._replicas)), count)
        ]
        check_fits(reserved)

        try:
            for pool in reserved:
                pool.bundles()
        except InsufficientResourcesError:
            for pool in reserved:
                pool.release()
            raise

        # The generation thread must have no call in progress while replicas join or leave.
        self._pools += reserved
        with self._replicas.exclusive():
            # The transfer schedules depend on the locations of all replicas; the next weight sync rebuilds
            # them.
            self._sync.send_to([self._of(number)[1] for number in range(count)])
            while len(self._replicas) > count:
                self._replicas.leave()
            while len(self._replicas) < count:
                self._replicas.join(self._of(len(self._replicas))[0])
            self._scheduler.resize()

        # Release devices only after their replicas have ended.
        while len(self._pools) > max(0, count - len(self._planned)):
            self._pools.pop().release()

    def _of(self, number: int) -> PlannedReplica:
        if number < len(self._planned):
            return self._planned[number]

        # A replica that joined shares no device with a trainer, so its rank locations only have to be unique.
        node = f"joined {number}"
        ranks = [RankLocation(node, f"{node}:{rank}") for rank in range(self._num_ranks)]
        return ReplicaPlace(self._pools[number - len(self._planned)]), ranks


def apply_request(scaling: ReplicaScaling | None, run_dir: Path) -> None:
    """Apply a pending request of `megarl scale`, a file in the run's folder that is deleted when it is read.

    If it cannot be satisfied, log the reason and continue unchanged.
    """
    try:
        count = take_request(run_dir)
        if count is not None and scaling is not None:
            scaling.scale(count)
            _log.warning("the run now has %d rollout replicas", count)
    except (ValueError, OSError) as error:
        _log.warning("the number of rollout replicas is unchanged: %s", error)
