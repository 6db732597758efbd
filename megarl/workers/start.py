"""Starts the worker groups that a run needs, on the pools of its placement, and gives the handles of its roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from megarl.config.architecture import Architecture
from megarl.config.roles import REWARD_MODEL
from megarl.config.schema import (
    ActorConfig,
    CriticConfig,
    Device,
    PlacementStrategy,
    PPOConfig,
    RewardModelConfig,
    RolloutEngineKind,
    SFTConfig,
)
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.controller.worker_class import RayClassWithInitArgs, create_colocated_worker_cls
from megarl.placement.plan import plan_placement
from megarl.placement.transport import choose_transport
from megarl.workers.critic import CriticWorker
from megarl.workers.engines import EngineSpec, build_engine
from megarl.workers.megatron import ModelSpec
from megarl.workers.policy import ActorWorker, ReferenceWorker
from megarl.workers.ratio_gate import FirstRatioGate
from megarl.workers.replicas import ReplicaPlace, Replicas
from megarl.workers.request_run import RolloutLimits
from megarl.workers.residency import EVERYBODY_STAYS, Residency, TakingTurns
from megarl.workers.reward import Reward, RewardWorker
from megarl.workers.reward_model import Reading, RewardModel, RewardModelWorker
from megarl.workers.roles import Actor, Critic, Reference, UpdatePlan
from megarl.workers.rollout import Rollout, TokenRules
from megarl.workers.weight_sync import WeightSource, WeightSync

_ANSWER_GRACE_S = 30.0  # an engine that hangs finds out itself and says why; only when it does not is its process ended


@dataclass(frozen=True, kw_only=True)
class PPORoles:
    """Who does what. Without a KL term there is no reference; a critic-free estimator has no critic. `residency`: who is in memory."""

    actor: Actor
    rollout: Rollout
    reward: Reward
    reference: Reference | None = None
    critic: Critic | None = None
    residency: Residency = EVERYBODY_STAYS

    @property
    def groups(self) -> list[RoleGroup | Rollout]:
        """All that runs, to be watched and ended."""
        roles = (self.actor, self.reference, self.critic, self.reward, self.reward.model)
        return [*(role.group for role in roles if role is not None), self.rollout]

    def drain_metrics(self) -> dict[str, float]:
        """What the roles have to say about themselves since the last time: memory, the push of weights, replicas."""
        return self.residency.metrics() | self.actor.drain_metrics() | self.rollout.drain_metrics()


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """Of every model that a run has, read before anything starts."""

    policy: Architecture
    reference: Architecture | None
    critic: Architecture | None
    reward_model: Architecture | None = None


_ModelConfig = ActorConfig | CriticConfig | RewardModelConfig


class _Starter:
    """Builds specs from config sections; keeps what all of them share."""

    def __init__(self, config: PPOConfig | SFTConfig, device: Device, pools: ResourcePoolManager) -> None:
        self._config = config
        self._device = device
        self._pools = pools

    def model(self, role: _ModelConfig, path: str, architecture: Architecture, **spec: object) -> ModelSpec:
        config = self._config
        return ModelSpec(
            path=path,
            architecture=architecture,
            dtype=config.model.dtype,
            parallel=role.parallel,
            engine=config.engine,
            device=self._device,
            seed=config.trainer.seed,
            **spec,  # type: ignore[arg-type]
        )

    def group(self, workers: Mapping[str, RayClassWithInitArgs]) -> dict[str, RoleGroup]:
        """Roles in one process per rank, on the bundles that the plan gives their group, which has the first one's name."""
        name = next(iter(workers))
        bundles = [numbers[0] for numbers in plan_placement(self._config).bundles(name)]
        pool = self._pools.get_resource_pool(name)
        if len(bundles) < pool.world_size:
            pool = pool.part(bundles)
        limit_s = self._config.trainer.phase_time_limit_s
        return RayWorkerGroup(pool, create_colocated_worker_cls(workers), phase_time_limit_s=limit_s).spawn()

    def weight_source(self, group: RoleGroup, architecture: Architecture) -> WeightSource:
        return WeightSource(
            group=group,
            architecture=architecture,
            parallel=self._config.actor.parallel,
            dtype=self._config.model.dtype,
            bucket_bytes=int(self._config.resharding.bucket_mb * 2**20),
        )


def start_ppo(config: PPOConfig, models: Architectures, rules: TokenRules, device: Device, pools: ResourcePoolManager) -> PPORoles:
    """Returns before the workers have loaded their weights; the first call to each waits for it. Where engines share the actor's
    devices, the actor has loaded its own, and made room."""
    trainer = config.trainer
    starter = _Starter(config, device, pools)
    updates = UpdatePlan(updates_per_step=trainer.updates_per_step, epochs_per_batch=trainer.epochs_per_batch, seed=trainer.seed)
    per_step = trainer.updates_per_step * trainer.epochs_per_batch
    policy = {"head": "lm", "temperature": config.rollout.temperature}

    actor_steps = max(1, trainer.total_steps - trainer.critic_warmup_steps) * per_step
    actor_spec = starter.model(
        config.actor,
        config.model.path,
        models.policy,
        optim=config.actor.optim,
        total_optimizer_steps=actor_steps,
        recompute=config.actor.recompute,
        **policy,
    )
    policies = {"actor": RayClassWithInitArgs(ActorWorker, actor_spec, config.algorithm)}
    if models.reference is not None:
        reference_spec = starter.model(config.actor, config.reference.path or config.model.path, models.reference, **policy)
        policies["reference"] = RayClassWithInitArgs(ReferenceWorker, reference_spec)
    policy_groups = starter.group(policies)
    scorers = _start_scorers(config, models, starter, per_step)
    reward = _start_reward(config, starter, scorers.get(REWARD_MODEL))
    residency = _residency(config, policy_groups)
    rollout = _start_rollout(config, rules, device, replica_places(config, device, pools, policy_groups["actor"]), residency)

    actor_group = policy_groups["actor"]
    source = starter.weight_source(actor_group, models.policy)
    return PPORoles(
        actor=Actor(
            actor_group,
            config.actor.parallel,
            config.actor.micro_batch,
            source,
            updates,
            residency,
            _weight_sync(config, source, device),
            config.algorithm,
            FirstRatioGate(config.model.dtype),
        ),
        reference=(
            Reference(policy_groups["reference"], config.actor.parallel, config.reference.micro_batch, residency)
            if "reference" in policy_groups
            else None
        ),
        critic=Critic(scorers["critic"], config.critic.parallel, config.critic.micro_batch, updates) if "critic" in scorers else None,
        rollout=rollout,
        reward=reward,
        residency=residency,
    )


def _residency(config: PPOConfig, policies: Mapping[str, RoleGroup]) -> Residency:
    """Where engines share the actor's devices, all that is in memory has left it when this returns: then engines can start."""
    if config.placement.strategy is not PlacementStrategy.hybrid:
        return EVERYBODY_STAYS
    turns = TakingTurns(policies["actor"], policies.get("reference"))
    turns.make_room()
    return turns


def _weight_sync(config: PPOConfig, source: WeightSource, device: Device) -> WeightSync:
    return WeightSync(
        source,
        transport=choose_transport(config, plan_placement(config), device),
        verify=config.resharding.verify,
        scratch_dir=config.trainer.output_dir,
        config_dir=config.model.path,
    )


def replica_places(config: PPOConfig, device: Device, pools: ResourcePoolManager, actor: RoleGroup) -> list[ReplicaPlace]:
    """Of each replica: the bundle of its first device, and the names of all its devices where it has those of several bundles."""
    bundles = plan_placement(config).bundles("rollout")
    parts = pools.get_resource_pool("rollout").split()
    if device is not Device.cuda or all(len(numbers) == 1 for numbers in bundles):
        return [ReplicaPlace(parts[numbers[0]]) for numbers in bundles]
    gpus = actor.execute_all_sync("visible_gpus")
    return [ReplicaPlace(parts[numbers[0]], {"CUDA_VISIBLE_DEVICES": ",".join(gpus[number] for number in numbers)}) for numbers in bundles]


def _start_rollout(config: PPOConfig, rules: TokenRules, device: Device, places: Sequence[ReplicaPlace], residency: Residency) -> Rollout:
    rollout, limit_s = config.rollout, config.trainer.phase_time_limit_s
    spec = EngineSpec(
        path=config.model.path,
        dtype=config.model.dtype,
        device=device,
        rollout=rollout,
        trust_remote_code=config.model.trust_remote_code,
        with_min_new_tokens=rollout.validation.min_new_tokens > 0,
        release_memory=config.placement.strategy is PlacementStrategy.hybrid,
    )
    replicas = Replicas(
        places,
        partial(build_engine, spec),
        restart_limit=rollout.restart_limit,
        phase_time_limit_s=limit_s,
    )
    # The reference engine answers when its batch is done, however long that takes; SGLang answers every few seconds.
    answers_meanwhile = rollout.engine is RolloutEngineKind.sglang
    limits = RolloutLimits(
        max_concurrency=rollout.max_concurrency,
        answer_limit_s=rollout.health_limit_s + _ANSWER_GRACE_S if answers_meanwhile else limit_s,
        sample_limit_s=limit_s,
    )
    return Rollout(replicas, rules, limits, config.trainer.seed, residency.before_generate)


def _start_scorers(config: PPOConfig, models: Architectures, starter: _Starter, per_step: int) -> dict[str, RoleGroup]:
    """Critic and reward model, those that there are; in the same processes where the plan has them so."""
    workers = {}
    if models.critic is not None:
        workers["critic"] = _critic_worker(config, models.critic, starter, per_step)
    if models.reward_model is not None:
        workers[REWARD_MODEL] = _reward_model_worker(config, models.reward_model, starter)
    groups: dict[str, RoleGroup] = {}
    for planned in plan_placement(config).groups:
        if fused := {role: workers[role] for role in planned.roles if role in workers}:
            groups |= starter.group(fused)
    return groups


def _critic_worker(config: PPOConfig, architecture: Architecture, starter: _Starter, per_step: int) -> RayClassWithInitArgs:
    spec = starter.model(
        config.critic,
        config.critic.model.path or config.model.path,
        architecture,
        head="value",
        optim=config.critic.optim,
        total_optimizer_steps=config.trainer.total_steps * per_step,
        recompute=config.critic.recompute,
    )
    return RayClassWithInitArgs(CriticWorker, spec, config.algorithm.value_loss)


def _reward_model_worker(config: PPOConfig, architecture: Architecture, starter: _Starter) -> RayClassWithInitArgs:
    model = config.reward.model
    assert model.path is not None
    spec = starter.model(model, model.path, architecture, head="value")
    return RayClassWithInitArgs(RewardModelWorker, spec, Reading.of(config, architecture))


def _start_reward(config: PPOConfig, starter: _Starter, model_group: RoleGroup | None) -> Reward:
    worker = RayClassWithInitArgs(RewardWorker, config.reward, config.model.path, config.model.trust_remote_code)
    group, parallel = starter.group({"reward": worker})["reward"], config.reward.model.parallel
    model = None if model_group is None else RewardModel(model_group, parallel)
    return Reward(group, model, config.reward.model.weight)


def start_sft(config: SFTConfig, architecture: Architecture, device: Device, pools: ResourcePoolManager) -> Actor:
    starter = _Starter(config, device, pools)
    spec = starter.model(
        config.actor,
        config.model.path,
        architecture,
        head="lm",
        optim=config.actor.optim,
        total_optimizer_steps=config.trainer.total_steps,
        recompute=config.actor.recompute,
    )
    group = starter.group({"actor": RayClassWithInitArgs(ActorWorker, spec)})["actor"]
    updates = UpdatePlan(updates_per_step=1, epochs_per_batch=1, seed=config.trainer.seed)
    return Actor(group, config.actor.parallel, config.actor.micro_batch, starter.weight_source(group, architecture), updates)
