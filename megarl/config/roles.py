"""The table of model roles: when a run needs each role, its configuration, phases and batch columns.

Everything about a role follows from its row in ROLES: the models of a run (`model_roles`), the phases of a
step (plan/placement/dataflow.py), pools, memory, timings, and the worker and handle that roles/start.py
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import NamedTuple

from megarl.config.dotted import value_at
from megarl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    DPOConfig,
    ExpertsConfig,
    FrozenMegatronConfig,
    JudgeConfig,
    MegatronConfig,
    MicroBatchConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    RejectionEstimator,
    RunConfig,
    RunKind,
)
from megarl.models.architecture import Architecture, LoRA

REWARD_MODEL = "reward_model"
TEACHER = "teacher"
SOURCE_TEACHER = "teacher_"  # followed by the name of a teacher of some data sources
JUDGE = "judge"  # followed by the judge's name: a role of the run that serves a judge's model
ENVIRONMENT = "environment"  # the processes of an agent's environments
# Reward functions and tools run on a CPU, so a custom placement may omit them.
WITHOUT_DEVICES = ("reward", ENVIRONMENT)


class RoleKind(str, Enum):
    """The kind of work of a role, which determines its worker and handle (roles/start.py)."""

    actor = "actor"  # the trained policy
    scorer = "scorer"  # a frozen policy, whose log-probs of the samples become a column of the batch
    teacher = "teacher"  # a scorer that the policy learns from, which may return its most likely tokens too
    critic = "critic"
    reward_model = "reward_model"


class Stage(IntEnum):
    """The position of a phase in a step."""

    reward = 1
    score = 2
    update = 3
    update_policy = 4  # the last update, because the weight sync follows


@dataclass(frozen=True, kw_only=True)
class RolePhase:
    """A phase of a step that a role executes. Every phase reads the responses and the role's weights.

    Attributes:
        name: The name in the metric `timing_s/<name>`.
        stage: Its position in a step.
        calls: The methods of the worker that compute it.
        reads: The batch columns that it reads in addition to the responses.
        writes: The columns that it adds to the batch.
        trains: Whether it updates the role's weights, which requires gradients and optimizer state.
    """

    name: str
    stage: Stage
    calls: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    trains: bool = False


@dataclass(frozen=True, kw_only=True)
class Role:
    """A row of the table. `*_key` and `*_keys` are dotted configuration keys.

    Attributes:
        name: The name of the role, as in `placement.roles`.
        is_needed: Whether a PPO run has the role.
        path_keys: The keys of its model folder. The first one that is set applies.
        megatron_keys: Its options of Megatron. The first section that is set applies.
        phases: The phases of a step that it executes.
        trained_key: The section with its optimizer and recomputation. None for a frozen model.
        with_value_head: Whether its output is a scalar per token.
        may_share_with: Roles whose devices it shares by default. The first one that the run has applies.
            Without any, it has its own devices.
        reads_policy_tokens: Whether it reads the policy's tokens. Otherwise it has its own tokenizer.
        base_of: The role whose model it is without its adapters, if that role trains adapters and this one
            has no folder of its own.
    """

    name: str
    kind: RoleKind
    is_needed: Callable[[PPOConfig], bool]
    path_keys: tuple[str, ...]
    parallel_key: str
    micro_batch_key: str
    megatron_keys: tuple[str, ...]
    phases: tuple[RolePhase, ...]
    trained_key: str | None = None
    with_value_head: bool = False
    may_share_with: tuple[str, ...] = ()
    reads_policy_tokens: bool = True
    base_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelRole(Role):
    """A role of a run: its row, with the values of its configuration.

    Attributes:
        path_key: The configuration key that gives the folder.
        optim: Its optimizer. None for a frozen model.
        recomputation: What is recomputed in the backward pass.
        routers: How the routers of a mixture-of-experts model are trained (the section `experts`).
        lora: The adapters that train instead of its weights, if any.
        lora_path: The folder of the adapters to start from. None: new adapters.
        serves_adapters: Whether engines get the adapters separately, not merged.
        freeze_vision: Whether a vision tower is not trained.
        indexer_loss: The weight of the loss that trains indexers; 0: they are frozen.
        megatron_key: The section of these options.
        shares_with: The role whose devices it shares by default.
        base_of: The role in whose processes it runs, as that role's model without adapters. None: it has a
            model of its own, also if its row names one.
        runs_base: Whether another role is this one's model without adapters.
        before_training: Whether it works before training only, on devices that it leaves to the trained
            model. It takes part in no step.
    """

    path: str
    path_key: str
    parallel: ParallelConfig
    micro_batch: MicroBatchConfig
    optim: OptimConfig | None
    recomputation: Recomputation = Recomputation()
    routers: ExpertsConfig = ExpertsConfig()
    lora: LoRA | None = None
    lora_path: str | None = None
    serves_adapters: bool = False
    freeze_vision: bool = False
    indexer_loss: float = 0.0
    megatron: MegatronConfig = MegatronConfig()
    megatron_key: str = "actor.megatron"
    shares_with: str | None = None
    runs_base: bool = False
    before_training: bool = False

    def trained(self, architecture: Architecture) -> Architecture:
        """Return the model of its folder with what the role trains: its adapters, and its indexers."""
        indexer = architecture.indexer
        if indexer is not None:
            indexer = replace(indexer, trains=self.indexer_loss > 0)
        return replace(architecture, lora=self.lora, indexer=indexer)


def needs_reference(config: PPOConfig) -> bool:
    return config.algorithm.kl.in_reward or config.algorithm.kl.in_loss


def needs_teacher(config: PPOConfig) -> bool:
    # A rule reports a run without a teacher.
    has_any = config.teacher.path is not None or bool(config.teachers)
    return config.algorithm.advantage.estimator.needs.teacher and has_any


def needs_critic(config: PPOConfig) -> bool:
    return config.algorithm.advantage.estimator.needs.critic


def needs_sum_pi_squared(algorithm: AlgorithmConfig) -> bool:
    """Whether scoring returns the sum of the squared probabilities at each token."""
    return algorithm.advantage.estimator.needs.sum_pi_squared


def scores_in_update(algorithm: AlgorithmConfig, *, one_update: bool) -> bool:
    """Whether the trainer's log-probs of the samples come from the update's own forward pass.

    This is so if the step has a single update, and nothing reads the log-probs before it.
    """
    is_read = (
        algorithm.kl.in_reward
        # Rejection changes the divisor of the loss.
        or algorithm.rollout_correction.rejection.estimator is not RejectionEstimator.none
        or algorithm.reads_old_log_probs
        or algorithm.policy_loss.kind.needs.whole_mini_batch
    )
    return one_update and not (is_read or algorithm.rollout_correction.bypass)


def needs_reward_model(config: PPOConfig) -> bool:
    return config.reward.model.path is not None


ROLES: tuple[Role, ...] = (
    Role(
        name="actor",
        kind=RoleKind.actor,
        is_needed=lambda config: True,
        path_keys=("model.path",),
        parallel_key="actor.parallel",
        micro_batch_key="actor.micro_batch",
        megatron_keys=("actor.megatron",),
        trained_key="actor",
        phases=(
            RolePhase(
                name="old_log_prob", stage=Stage.score, calls=("log_probs",), writes=("old_log_probs",)
            ),
            RolePhase(
                name="update_actor",
                stage=Stage.update_policy,
                calls=("update", "update_scored"),
                reads=("old_log_probs", "advantages"),
                trains=True,
            ),
        ),
    ),
    Role(
        name="reference",
        kind=RoleKind.scorer,
        is_needed=needs_reference,
        path_keys=("reference.path", "model.path"),
        parallel_key="actor.parallel",  # It runs in the actor's processes.
        micro_batch_key="reference.micro_batch",
        megatron_keys=("reference.megatron", "actor.megatron"),
        may_share_with=("actor",),
        base_of="actor",
        phases=(RolePhase(name="ref", stage=Stage.score, calls=("log_probs",), writes=("ref_log_prob",)),),
    ),
    Role(
        name=TEACHER,
        kind=RoleKind.teacher,
        is_needed=needs_teacher,
        path_keys=("teacher.path",),
        parallel_key="teacher.parallel",
        micro_batch_key="teacher.micro_batch",
        megatron_keys=("teacher.megatron",),
        may_share_with=("actor",),
        phases=(
            RolePhase(name=TEACHER, stage=Stage.score, calls=("log_probs",), writes=("teacher_log_prob",)),
        ),
    ),
    Role(
        name="critic",
        kind=RoleKind.critic,
        is_needed=needs_critic,
        path_keys=("critic.model.path", "model.path"),
        parallel_key="critic.parallel",
        micro_batch_key="critic.micro_batch",
        megatron_keys=("critic.megatron",),
        trained_key="critic",
        with_value_head=True,
        phases=(
            RolePhase(name="values", stage=Stage.score, calls=("values",), writes=("values",)),
            RolePhase(
                name="update_critic",
                stage=Stage.update,
                calls=("update",),
                reads=("values", "returns"),
                trains=True,
            ),
        ),
    ),
    Role(
        name=REWARD_MODEL,
        kind=RoleKind.reward_model,
        is_needed=needs_reward_model,
        path_keys=("reward.model.path",),
        parallel_key="reward.model.parallel",
        micro_batch_key="reward.model.micro_batch",
        megatron_keys=("reward.model.megatron",),
        with_value_head=True,
        may_share_with=("critic", "reward"),
        reads_policy_tokens=False,
        phases=(
            RolePhase(
                name=REWARD_MODEL,
                stage=Stage.reward,
                calls=("score_conversations",),
                writes=("reward_model_scores",),
            ),
        ),
    ),
)


def teachers_by_source(config: PPOConfig) -> dict[str, str]:
    """Return the role of the teacher of each data source that has one of its own."""
    return {
        source: f"{SOURCE_TEACHER}{teacher.name}"
        for teacher in config.teachers
        for source in teacher.data_sources
    }


def absent_teacher(config: PPOConfig, data_sources: Collection[str]) -> tuple[str, str] | None:
    """Return a problem and its hint if no teacher scores the samples of one of these data sources."""
    known = teachers_by_source(config)
    if not needs_teacher(config) or config.teacher.path is not None:
        return None
    unknown = sorted(set(data_sources) - known.keys())
    if not unknown:
        return None
    return (
        f"no teacher scores the samples of data_source {', '.join(map(repr, unknown))}; `teachers` have "
        f"{', '.join(map(repr, known))}",
        "add it to the data_sources of one of them, or set teacher.path to a teacher of all others",
    )


def absent_teacher_prompts(column: str) -> tuple[str, str]:
    """Return the problem and its hint that a training file lacks the teacher's prompts."""
    return (
        f"has no column {column!r} (data.columns.teacher_prompt)",
        "add it, with the prompt that the teacher sees, or set data.columns.teacher_prompt=null",
    )


class ServedJudge(NamedTuple):
    """A judge whose model the run serves."""

    key: str
    path: str
    settings: JudgeConfig


def judge_roles(config: RunConfig) -> dict[str, ServedJudge]:
    """Return the judges whose models the run serves, by the names of their roles."""
    if not isinstance(config, PPOConfig):
        return {}
    return {
        f"{JUDGE}_{judge.name}": ServedJudge(f"reward.judges[{index}]", judge.path, judge)
        for index, judge in enumerate(config.reward.judges)
        if judge.path is not None
    }


def is_model_role(name: str) -> bool:
    """Return whether a role is a model of Megatron, unlike engines, judges' servers, and CPU processes."""
    return name.startswith(SOURCE_TEACHER) or any(role.name == name for role in ROLES)


def role_named(name: str) -> Role:
    """Return the row of a role. All teachers of data sources have the teacher's, with their own names."""
    if not name.startswith(SOURCE_TEACHER):
        return next(role for role in ROLES if role.name == name)
    row = role_named(TEACHER)
    # Each writes rows of its own, so that teachers need not wait for each other.
    phases = (replace(phase, name=name, writes=(f"{name}_log_prob",)) for phase in row.phases)
    return replace(row, name=name, phases=tuple(phases))


def _teacher_rows(row: Role, config: PPOConfig) -> Iterator[Role]:
    """Yield the rows of all teachers of a run, given the row of the section `teacher`."""
    if config.teacher.path is not None:
        yield row
    for index, teacher in enumerate(config.teachers):
        key = f"teachers[{index}]"
        if teacher.path is not None:  # otherwise a rule reports it
            yield replace(
                role_named(f"{SOURCE_TEACHER}{teacher.name}"),
                path_keys=(f"{key}.path",),
                parallel_key=f"{key}.parallel",
                micro_batch_key=f"{key}.micro_batch",
                megatron_keys=(f"{key}.megatron",),
            )


def model_roles(config: RunConfig) -> tuple[ModelRole, ...]:
    """Return the model roles of a run in the order of the table."""
    if not isinstance(config, PPOConfig):
        is_reward_model = config.kind is RunKind.reward_model
        roles = [_of_run(replace(role_named("actor"), with_value_head=is_reward_model), config, ())]
        if isinstance(config, DPOConfig) and config.reference.path is not None:
            roles.append(_pair_reference(config))
        return tuple(roles)

    needed = [role for role in ROLES if role.is_needed(config)]
    rows = [
        row for role in needed for row in (_teacher_rows(role, config) if role.name == TEACHER else [role])
    ]
    names = (*(role.name for role in rows), "reward")
    roles = [_of_run(role, config, names) for role in rows]

    owners = {role.base_of for role in roles}
    return tuple(replace(role, runs_base=role.name in owners) for role in roles)


def _pair_reference(config: DPOConfig) -> ModelRole:
    """Return the reference of a run on pairs that has a model of its own."""
    row = replace(
        role_named("reference"),
        path_keys=("reference.path",),
        micro_batch_key="actor.micro_batch",
        megatron_keys=("actor.megatron",),
        base_of=None,
    )
    return replace(_of_run(row, config, ("actor",)), before_training=True)


def _of_run(role: Role, config: RunConfig, names: tuple[str, ...]) -> ModelRole:
    """Combine a row with the values of a run. `names` are all roles of the run."""
    # A role without its own path falls back to the last key.
    path_key = next((key for key in role.path_keys if value_at(config, key)), role.path_keys[-1])

    section: ActorConfig | None = None if role.trained_key is None else value_at(config, role.trained_key)
    megatron_key, megatron = _megatron_options(role, config)

    return ModelRole(
        **vars(role) | {"base_of": role.base_of if _is_base(role, config, path_key) else None},
        path=value_at(config, path_key),
        path_key=path_key,
        parallel=value_at(config, role.parallel_key),
        micro_batch=value_at(config, role.micro_batch_key),
        optim=None if section is None else section.optim,
        recomputation=Recomputation() if section is None else section.recomputation,
        routers=ExpertsConfig() if section is None else section.experts,
        lora=None if section is None else section.adapters,
        lora_path=None if section is None else section.lora.path,
        serves_adapters=section is not None and section.served_adapters is not None,
        freeze_vision=section is not None and section.freeze_vision,
        indexer_loss=config.model.sparse_attention.indexer_loss_coefficient
        if section is not None and role.trained_key == "actor"
        else 0.0,
        megatron=megatron,
        megatron_key=megatron_key,
        shares_with=next((other for other in role.may_share_with if other in names), None),
    )


def _is_base(role: Role, config: RunConfig, path_key: str) -> bool:
    """Return whether a role is the model of another role without its adapters."""
    if role.base_of is None or path_key == role.path_keys[0]:
        return False
    return config.trained_models[role.base_of].adapters is not None


def _megatron_options(role: Role, config: RunConfig) -> tuple[str, MegatronConfig]:
    """Return the key and the value of a role's options of Megatron. A frozen model has only layers."""
    sections: list[tuple[str, MegatronConfig | FrozenMegatronConfig]] = [
        (key, value_at(config, key)) for key in role.megatron_keys
    ]
    key, section = next((each for each in sections if each[1].transformer is not None), sections[-1])
    if isinstance(section, MegatronConfig) and role.trained_key is not None:
        return key, section
    return key, MegatronConfig(transformer=section.transformer or {})
