"""Start the worker groups of a run on the pools of its placement, and return the handles of its roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megarl.config.load import with_absolute_paths, with_dtype
from megarl.config.roles import (
    REWARD_MODEL,
    TEACHER,
    ModelRole,
    RoleKind,
    model_roles,
    teachers_by_source,
)
from megarl.config.schema import Device, EngineDType, PPOConfig, PreferenceConfig, RunConfig, SFTConfig
from megarl.controller.actors import LearnedLimits
from megarl.controller.environment import weight_group_settings
from megarl.controller.group import NO_ENVIRONMENT, RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import RayResourcePool, ResourcePoolManager
from megarl.controller.restarts import RestartBudget, node_wait_s
from megarl.controller.worker import RayClassWithInitArgs, create_colocated_worker_cls
from megarl.engine.offload import StatePart
from megarl.engine.spec import ModelSpec, spec_of
from megarl.engine.top_tokens import TopK
from megarl.models.architecture import Architecture
from megarl.models.families import REWARD_CLASS
from megarl.plan.placement.dataflow import OffloadPlan, at_work, step_phases
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.transport import choose_transport, joins_weight_groups
from megarl.rewards.judge_servers import JudgeServers, start_judges
from megarl.rewards.restarted_group import RestartedGroup
from megarl.rewards.reward_worker import RewardWorker
from megarl.rewards.role import Reward
from megarl.roles.checks import FirstRatioCheck, LogProbCheck
from megarl.roles.megatron_role import MiniBatchPlan, RewardModel
from megarl.roles.megatron_worker import ActorWorker, BaseWorker, CriticWorker, MegatronWorker, PolicyWorker
from megarl.roles.models import ABSENT, Absent, Actor, Critic, Scorer, Teachers
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.roles.preferences import PairModel, PairPolicy, PairReference, PairRewardModel
from megarl.roles.reward_model_worker import RewardModelWorker
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.rollout_weights import FolderWeights, RolloutWeights
from megarl.rollout.driver.start_rollout import ReplicaScaling, replica_scaling, start_replicas, start_rollout
from megarl.weights.sync.forecast import rank_places
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import WeightSync


@dataclass(frozen=True, kw_only=True)
class PPORoles:
    """Handles to the roles of a run.

    Attributes:
        actor: The policy.
        rollout: The engines.
        weights: Weight sync of the engines.
        reward: The reward functions and the reward model.
        critic: The critic, or ABSENT.
        scorers: Frozen policies that score samples, by role.
        teachers: The teachers by data source; None in a run with one teacher or none.
        schedule: The colocation schedule.
        scaling: Changes the number of replicas; None if engines share devices with other roles.
    """

    actor: Actor
    rollout: Rollout
    weights: RolloutWeights
    reward: Reward
    critic: Critic | Absent = ABSENT
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    teachers: Teachers | None = None
    schedule: OffloadSchedule = field(default_factory=OffloadSchedule)
    scaling: ReplicaScaling | None = None

    def scorer(self, name: str) -> Scorer | Absent:
        """Return the frozen policy of this role, or ABSENT if the run does not have it."""
        return self.scorers.get(name, ABSENT)

    @property
    def reference(self) -> Scorer | Absent:
        return self.scorer("reference")

    @property
    def teacher(self) -> Scorer | Teachers | Absent:
        return self.teachers or self.scorer(TEACHER)

    @property
    def groups(self) -> list[RoleGroup | Rollout]:
        """Processes of all roles, which the driver monitors and ends."""
        roles = (self.actor, *self.scorers.values(), self.critic, self.reward, self.reward.model)
        return [*(role.group for role in roles if role), *self.reward.processes.servers.groups, self.rollout]

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of the roles since the last call: memory, weight syncs, replicas."""
        return self.schedule.metrics() | self.weights.drain_metrics() | self.rollout.drain_metrics()


_WORKERS: dict[RoleKind, type[MegatronWorker]] = {
    RoleKind.actor: ActorWorker,
    RoleKind.scorer: PolicyWorker,
    RoleKind.teacher: PolicyWorker,
    RoleKind.critic: CriticWorker,
    RoleKind.reward_model: RewardModelWorker,
}


class _Starter:
    """Decides which role runs where, and what is offloaded in which phase; builds specs and groups."""

    def __init__(self, config: RunConfig, device: Device, pools: ResourcePoolManager) -> None:
        self._config = config
        self._device = device
        self._pools = pools
        self.plan = plan_placement(config)
        self.turns = OffloadPlan(self.plan)

    def model(self, role: ModelRole, architecture: Architecture) -> ModelSpec:
        offloaded = tuple(map(StatePart, self.turns.offloaded_at_first(role.name)))
        return spec_of(self._config, role, architecture, self._device, offloaded)

    def groups(self, workers: Mapping[str, RayClassWithInitArgs]) -> dict[str, RoleGroup]:
        """Start the groups, and return them by role. The roles of a group share one process per rank.

        If groups share devices, each one is built and offloaded before the next begins.
        """
        groups: dict[str, RoleGroup] = {}
        for group in self.plan.groups:
            if group.roles[0] not in workers:
                continue
            # Groups on the same devices must be offloaded before this one allocates.
            self._make_room(group.roles[0], groups)
            pool = group_pool(self.plan, self._pools, group)
            limit_s = self._config.trainer.phase_time_limit_s
            fused = create_colocated_worker_cls({role: workers[role] for role in group.roles})
            joins_engines = (
                self._device is Device.cuda
                and "actor" in group.roles
                and joins_weight_groups(self._config, self.plan)
            )
            # NCCL settings are environment variables, so they must be set before the process starts.
            started = RayWorkerGroup(
                pool,
                fused,
                phase_time_limit_s=limit_s,
                environment=weight_group_settings() if joins_engines else NO_ENVIRONMENT,
                at_work=at_work(self.plan),
                learned_limits=_learned_limits(self._config),
            )
            groups |= started.spawn()

        # The engines start next: models on their devices must be offloaded by then.
        if "rollout" in self.plan.roles:
            self._make_room("rollout", groups)
        return groups

    def _make_room(self, role: str, groups: Mapping[str, RoleGroup]) -> None:
        for other in self.turns.takes_turns_with(role):
            if other in groups:
                groups[other].ready.get()

    def weight_source(self, group: RoleGroup, architecture: Architecture) -> WeightSource:
        return WeightSource(
            group=group,
            architecture=architecture.base,
            parallel=self._config.actor.parallel,
            dtype=self._config.model.dtype,
            bucket_bytes=int(self._config.resharding.bucket_mb * 2**20),
            quantizes=isinstance(self._config, PPOConfig) and self._config.rollout.dtype is EngineDType.fp8,
            nodes=[place.node for (place,) in rank_places(self.plan, "actor")],
        )


def _learned_limits(config: RunConfig) -> LearnedLimits:
    """Return the limits of calls that score or train a batch, which take about equally long in each step."""
    methods = {call for phase in step_phases() for call in phase.calls}
    # The rows that a teacher of data sources scores differ from step to step.
    if isinstance(config, PPOConfig) and teachers_by_source(config):
        methods.remove("log_probs")
    return LearnedLimits(frozenset(methods), config.recovery.hang_factor)


def group_pool(plan: PlacementPlan, pools: ResourcePoolManager, group: GroupPlan) -> RayResourcePool:
    """Return the pool of a group's processes, each with the first bundle of those that it has."""
    return pools.get_resource_pool(group.roles[0]).part([numbers[0] for numbers in plan.bundles(group.name)])


def start_ppo(
    config: PPOConfig,
    models: Mapping[str, Architecture],
    rules: TokenRules,
    device: Device,
    pools: ResourcePoolManager,
) -> PPORoles:
    """Start all roles of a run.

    This returns before the workers have loaded their weights; the first call to each waits for it. Models
    that share devices with others have loaded their weights and are offloaded.

    Args:
        models: Architecture of each role with a model.
    """
    # Resolve values that depend on this machine: the dtype if no file specified it, and paths, because
    # workers may run in another folder.
    config = with_absolute_paths(with_dtype(config, device is Device.cuda))
    starter = _Starter(config, device, pools)
    plan = starter.plan
    turns = starter.turns
    updates = _mini_batch_plan(config)

    # Start the models first, because they free devices that engines share with them.
    groups = starter.groups(_workers(config, models, starter, rules))
    judges = start_judges(config, device, plan, pools)
    replicas = start_replicas(config, device, plan, pools, turns.engines_move, config.actor.served_adapters)
    schedule = OffloadSchedule(
        turns, {role: group for role, group in groups.items() if role != "reward"}, replicas
    )

    # Connect the actor to the engines.
    source = starter.weight_source(groups["actor"], models["actor"])
    sync = _weight_sync(config, source, plan)
    weights = RolloutWeights(sync, replicas, schedule)
    rollout = start_rollout(config, plan, pools, replicas, weights, rules)
    judges.connect(groups["reward"])
    scorers = _scorers(config, groups, schedule, models["actor"].vocab_size)
    by_source = {
        source: scorers[role] for source, role in teachers_by_source(config).items() if role in scorers
    }

    return PPORoles(
        actor=Actor(
            groups["actor"],
            config.actor.parallel,
            config.actor.micro_batch,
            source,
            updates,
            schedule,
            config.algorithm,
            FirstRatioCheck(config.model.dtype),
            LogProbCheck(config.resharding.max_log_prob_difference),
            share_prompts=_shares_prompts(config),
        ),
        critic=_critic(config, groups["critic"], updates, schedule) if "critic" in groups else ABSENT,
        scorers=scorers,
        teachers=Teachers(by_source=by_source, other=scorers.get(TEACHER)) if by_source else None,
        rollout=rollout,
        weights=weights,
        reward=_reward(config, groups, schedule, judges),
        schedule=schedule,
        scaling=None
        if turns.engines_move
        else replica_scaling(config, device, plan, pools, replicas, rollout, sync),
    )


def _mini_batch_plan(config: PPOConfig) -> MiniBatchPlan:
    return MiniBatchPlan(
        updates_per_step=config.trainer.updates_per_step,
        epochs_per_batch=config.trainer.epochs_per_batch,
        seed=config.trainer.seed,
        critic_warmup_steps=config.trainer.critic_warmup_steps,
    )


def _shares_prompts(config: RunConfig) -> bool:
    return config.engine.share_prompts and config.engine.packing


def _critic(config: PPOConfig, group: RoleGroup, updates: MiniBatchPlan, schedule: OffloadSchedule) -> Critic:
    return Critic(
        group,
        config.critic.parallel,
        config.critic.micro_batch,
        updates,
        config.algorithm.value_loss,
        schedule,
        share_prompts=_shares_prompts(config),
    )


def _scorers(
    config: PPOConfig, groups: Mapping[str, RoleGroup], schedule: OffloadSchedule, vocab_size: int
) -> dict[str, Scorer]:
    """Return the handle of every frozen policy in the role table that the run has.

    Args:
        vocab_size: The size of the policy's vocabulary.
    """
    k = config.algorithm.teacher_top_k
    top = None if k is None else TopK(k, vocab_size)

    return {
        role.name: Scorer(
            role,
            groups[role.name],
            role.parallel,
            role.micro_batch,
            schedule,
            share_prompts=_shares_prompts(config),
            top=top if role.kind is RoleKind.teacher else None,
        )
        for role in model_roles(config)
        if role.kind in (RoleKind.scorer, RoleKind.teacher)
    }


def _workers(
    config: PPOConfig, models: Mapping[str, Architecture], starter: _Starter, rules: TokenRules
) -> dict[str, RayClassWithInitArgs]:
    """Return the worker class of each role except the rollout."""
    workers = {
        "reward": RayClassWithInitArgs(
            RewardWorker, config.reward, config.model.path, config.model.trust_remote_code
        )
    }
    for role in model_roles(config):
        architecture = models[role.name]
        # A role with its own tokenizer also needs to know how to encode conversations.
        own = () if role.reads_policy_tokens else (config.reward.model, config.model, rules.chat_time)
        worker = _WORKERS[role.kind] if role.base_of is None else BaseWorker
        workers[role.name] = RayClassWithInitArgs(worker, starter.model(role, architecture), *own)

    return workers


def _reward(
    config: PPOConfig,
    groups: Mapping[str, RoleGroup],
    schedule: OffloadSchedule,
    judges: JudgeServers,
) -> Reward:
    settings = config.reward.model
    model = None
    if REWARD_MODEL in groups:
        model = RewardModel(groups[REWARD_MODEL], settings.parallel, settings.micro_batch, schedule)
    processes = RestartedGroup(
        groups["reward"],
        RestartBudget(config.rollout.restart_limit),
        judges,
        node_wait_s(config.recovery),
    )
    return Reward(processes, model, settings.weight, with_messages=bool(config.reward.judges))


def _weight_sync(config: PPOConfig, source: WeightSource, plan: PlacementPlan) -> WeightSync:
    if config.actor.served_adapters is not None:
        source = replace(source, architecture=replace(source.architecture, lora=config.actor.adapters))
    # On a CPU, engines serve the policy by a class without indexers.
    if source.architecture.indexer is not None and not source.is_on_cuda:
        source = replace(source, architecture=replace(source.architecture, indexer=None))
    return WeightSync(
        source,
        [place for (place,) in rank_places(plan, "actor")],
        rank_places(plan, "rollout"),
        transport=choose_transport(config, plan),
        verify=config.resharding.verify,
        scratch_dir=config.trainer.output_dir,
        config_dir=config.model.path,
        limit_s=config.trainer.phase_time_limit_s,
        sends_changes=config.resharding.delta,
    )


def start_evaluation(
    config: PPOConfig,
    models: Mapping[str, Architecture],
    weights: FolderWeights,
    rules: TokenRules,
    device: Device,
    pools: ResourcePoolManager,
) -> tuple[Rollout, Reward]:
    """Start the roles that sample and score, without training roles.

    The engines share no device with other roles, and have their weights when this returns. Raises the errors
    of RolloutWeights.push.

    Args:
        models: Architecture of each role with a model.
    """
    config = with_absolute_paths(config)
    starter = _Starter(config, device, pools)
    plan = starter.plan

    # The engines share no devices here, so the schedule has no plan and moves nothing.
    schedule = OffloadSchedule()
    workers = {
        role: worker
        for role, worker in _workers(config, models, starter, rules).items()
        if role in ("reward", REWARD_MODEL)
    }
    groups = starter.groups(workers)
    judges = start_judges(config, device, plan, pools)
    replicas = start_replicas(config, device, plan, pools, takes_turns=False)
    rollout_weights = RolloutWeights(weights, replicas, schedule)
    rollout_weights.push()
    judges.connect(groups["reward"])

    rollout = start_rollout(config, plan, pools, replicas, rollout_weights, rules)
    return rollout, _reward(config, groups, schedule, judges)


def start_sft(
    config: SFTConfig, architecture: Architecture, device: Device, pools: ResourcePoolManager
) -> Actor:
    config = with_absolute_paths(with_dtype(config, device is Device.cuda))
    starter = _Starter(config, device, pools)
    (role,) = model_roles(config)
    spec = starter.model(role, architecture)
    group = starter.groups({"actor": RayClassWithInitArgs(ActorWorker, spec)})["actor"]
    updates = MiniBatchPlan(updates_per_step=1, epochs_per_batch=1, seed=config.trainer.seed)

    return Actor(
        group,
        config.actor.parallel,
        config.actor.micro_batch,
        starter.weight_source(group, architecture),
        updates,
    )


def start_trained(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    device: Device,
    pools: ResourcePoolManager,
) -> Actor | Critic | PairModel:
    """Start one trained model of a run alone, on the devices that the run would give it."""
    config = with_absolute_paths(with_dtype(config, device is Device.cuda))
    if isinstance(config, SFTConfig):
        return start_sft(config, architecture, device, pools)
    if isinstance(config, PreferenceConfig):
        return start_preferences(config, architecture, device, pools)
    assert isinstance(config, PPOConfig)
    starter = _Starter(config, device, pools)

    # No other model needs the devices, so nothing is offloaded.
    spec = replace(starter.model(role, architecture), offloaded_at_first=())
    workers = create_colocated_worker_cls({role.name: RayClassWithInitArgs(_WORKERS[role.kind], spec)})
    pool = group_pool(starter.plan, pools, starter.plan.group_of(role.name))
    started = RayWorkerGroup(pool, workers, phase_time_limit_s=config.trainer.phase_time_limit_s)
    group = started.spawn()[role.name]
    updates = _mini_batch_plan(config)
    if role.kind is RoleKind.critic:
        return _critic(config, group, updates, OffloadSchedule())
    # Nothing is checked, because another model or layout may be started to find where it differs.
    return Actor(
        group,
        config.actor.parallel,
        config.actor.micro_batch,
        starter.weight_source(group, architecture),
        updates,
        algorithm=config.algorithm,
        share_prompts=_shares_prompts(config),
    )


def start_preferences(
    config: PreferenceConfig, architecture: Architecture, device: Device, pools: ResourcePoolManager
) -> PairModel:
    """Start the model of a run on pairs of answers, with the weights of its folder."""
    config = with_absolute_paths(with_dtype(config, device is Device.cuda))
    starter = _Starter(config, device, pools)
    role = model_roles(config)[0]
    spec = starter.model(role, architecture)
    handle = PairRewardModel if role.with_value_head else PairPolicy
    group = starter.groups({"actor": RayClassWithInitArgs(handle.worker, spec)})["actor"]

    # A reward model is saved as the class that `reward.model` of an RL run reads.
    weights = replace(starter.weight_source(group, architecture), head=spec.head, value_class=REWARD_CLASS)

    return handle(group, config, weights, share_prompts=_shares_prompts(config))


def start_pair_reference(
    config: PreferenceConfig, architecture: Architecture, device: Device, pools: ResourcePoolManager
) -> PairReference:
    """Start the reference of a run on pairs that has a model of its own, on the policy's devices.

    It must be shut down before the policy starts.
    """
    config = with_absolute_paths(with_dtype(config, device is Device.cuda))
    starter = _Starter(config, device, pools)
    (role,) = (role for role in model_roles(config) if role.before_training)
    started = RayWorkerGroup(
        group_pool(starter.plan, pools, starter.plan.group_of("actor")),
        RayClassWithInitArgs(_WORKERS[role.kind], starter.model(role, architecture)),
        role=role.name,
        phase_time_limit_s=config.trainer.phase_time_limit_s,
        at_work={role.name: at_work(starter.plan)["actor"]},
    )
    return PairReference(started, role, share_prompts=_shares_prompts(config))
