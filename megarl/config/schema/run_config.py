"""The kinds of run: the sections of each, and the properties that the rest of megarl reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from megarl.config.dotted import value_at
from megarl.config.kinds import AdvantageEstimator, DPOLossKind, RolloutEngineKind
from megarl.config.schema.agent import AgentConfig
from megarl.config.schema.algorithm import (
    WITH_CRITIC,
    AlgorithmConfig,
    DPOLossConfig,
    KLWhere,
    RewardModelLossConfig,
)
from megarl.config.schema.data import (
    DataConfig,
    PreferenceDataConfig,
    RatedPreferenceDataConfig,
    SFTDataConfig,
)
from megarl.config.schema.keys import Reader, matters, only_with
from megarl.config.schema.models import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    PairReferenceConfig,
    ReferenceConfig,
    SourceTeacherConfig,
    TeacherConfig,
)
from megarl.config.schema.reward import RewardConfig
from megarl.config.schema.rollout import ReshardingConfig, RolloutConfig
from megarl.config.schema.run import (
    CheckpointConfig,
    Device,
    EngineConfig,
    PlacementConfig,
    PreferenceTrainerConfig,
    ProfileConfig,
    RecoveryConfig,
    RunKind,
    SFTTrainerConfig,
    StepsConfig,
    TrackingConfig,
    TrainerConfig,
)

_PENALTY = Reader("algorithm.kl.where", (KLWhere.reward, KLWhere.loss))
_TEACHER = Reader(
    "algorithm.advantage.estimator", tuple(each for each in AdvantageEstimator if each.needs.teacher)
)
_ENGINES = Reader("rollout.engine")  # only kinds that generate have the key


class RunConfig:
    """Base class of all kinds of run. Each kind is a frozen dataclass of sections.

    The common sections are declared here and defined by each kind, in the order of the reference page.
    Properties abstract over the differences between the kinds. Those that are defined here are of kinds that
    make one update with the rows of a file and generate nothing.

    Attributes:
        batch_key: The key of `prompts_per_step`.
        length_keys: The keys that limit the length of a row.
        rows_together: The number of consecutive rows that one loss reads, so that they stay in one
            micro-batch.
    """

    batch_key: ClassVar[str]
    length_keys: ClassVar[tuple[str, ...]] = ("data.max_length",)
    rows_together: ClassVar[int] = 1

    kind: RunKind
    model: ModelConfig
    data: DataConfig | SFTDataConfig | PreferenceDataConfig
    actor: ActorConfig
    placement: PlacementConfig
    resharding: ReshardingConfig
    engine: EngineConfig
    checkpoint: CheckpointConfig
    recovery: RecoveryConfig
    trainer: StepsConfig
    tracking: TrackingConfig
    profile: ProfileConfig
    device: Device

    def with_sections(self, **sections: object) -> Self:
        """Return a copy of the configuration with other sections."""
        return cast(Self, replace(cast(Any, self), **sections))

    # ---- the batch of a step

    @property
    def prompts_per_step(self) -> int:
        """The rows of the data files that a step trains on: prompts or whole conversations."""
        return value_at(self, self.batch_key)

    @property
    def samples_per_prompt(self) -> int:
        """The samples that are generated for each of these rows; 1 if nothing is generated."""
        return 1

    @property
    def updates_per_pass(self) -> int:
        """The number of mini-batches, and so of optimizer steps, in one pass over a step's samples."""
        return 1

    @property
    def passes_per_step(self) -> int:
        """The number of passes over a step's samples."""
        return 1

    @property
    def longest_prompt(self) -> int:
        """The maximum number of prompt tokens of a row, which have no loss."""
        return 1

    @property
    def longest_response(self) -> int:
        """The maximum number of response tokens of a row."""
        return self.data.longest_row - 1

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def max_row_tokens(self) -> int:
        """The maximum number of tokens of a row, prompt and response together."""
        return self.longest_prompt + self.longest_response

    # ---- models

    @property
    def trained_models(self) -> Mapping[str, ActorConfig]:
        """The sections of the models that this kind of run can train, by key."""
        return {"actor": self.actor}

    @property
    def temperature(self) -> float:
        """The divisor of the actor's logits."""
        return 1.0

    # ---- what a run needs on its machines

    @property
    def checkpoint_path(self) -> Path:
        """The folder of the run's checkpoints."""
        given = self.checkpoint.dir
        return Path(self.trainer.output_dir) / "checkpoints" if given is None else Path(given)

    @property
    def rollout_engine(self) -> RolloutEngineKind | None:
        """The generation engine; None if nothing is generated."""
        return None


@dataclass(frozen=True, kw_only=True)
class PPOConfig(RunConfig):
    """The configuration of an RL run."""

    batch_key: ClassVar[str] = "trainer.prompts_per_step"
    length_keys: ClassVar[tuple[str, ...]] = ("data.max_prompt_length", "data.max_response_length")

    kind: RunKind = RunKind.ppo  # kind of run, which determines the valid keys of the file
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = matters(
        field(default_factory=AlgorithmConfig), "always: the name of a preset, such as grpo, dapo or ppo"
    )
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = only_with(field(default_factory=ReferenceConfig), _PENALTY, is_usual=True)
    teacher: TeacherConfig = only_with(field(default_factory=TeacherConfig), _TEACHER, is_refused=True)
    teachers: list[SourceTeacherConfig] = only_with(
        field(default_factory=list), _TEACHER, is_refused=True
    )  # teachers of some data sources only
    critic: CriticConfig = only_with(field(default_factory=CriticConfig), WITH_CRITIC, is_usual=True)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = only_with(field(default_factory=ReshardingConfig), _ENGINES)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    device: Device = Device.auto  # device type that the run computes on

    @property
    def samples_per_prompt(self) -> int:
        return self.rollout.n

    @property
    def updates_per_pass(self) -> int:
        return self.trainer.updates_per_step

    @property
    def passes_per_step(self) -> int:
        return self.trainer.epochs_per_batch

    @property
    def longest_prompt(self) -> int:
        return self.data.max_prompt_length

    @property
    def longest_response(self) -> int:
        return self.data.max_response_length

    @property
    def trained_models(self) -> Mapping[str, ActorConfig]:
        return {"actor": self.actor, "critic": self.critic}

    @property
    def temperature(self) -> float:
        return self.rollout.temperature

    @property
    def rollout_engine(self) -> RolloutEngineKind:
        return self.rollout.engine


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(RunConfig):
    """Base class of the kinds that train one model on the rows of files, and generate nothing."""

    kind: RunKind
    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig | PreferenceDataConfig
    actor: ActorConfig = field(default_factory=ActorConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = only_with(field(default_factory=ReshardingConfig), _ENGINES)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    trainer: StepsConfig
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    device: Device = Device.auto  # device type that the run computes on


@dataclass(frozen=True, kw_only=True)
class SFTConfig(OfflineConfig):
    """The configuration of a supervised fine-tuning run. `actor` is the trained model."""

    batch_key: ClassVar[str] = "trainer.samples_per_step"

    kind: RunKind = RunKind.sft  # required in the file
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)


class PreferenceConfig(OfflineConfig):
    """Base class of the kinds that train on pairs of answers. A pair is a prompt with two samples."""

    batch_key: ClassVar[str] = "trainer.pairs_per_step"
    rows_together: ClassVar[int] = 2

    data: PreferenceDataConfig
    trainer: PreferenceTrainerConfig

    @property
    def samples_per_prompt(self) -> int:
        return 2


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PreferenceConfig):
    """The configuration of direct preference optimization. `actor` is the trained policy."""

    kind: RunKind = RunKind.dpo  # required
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)
    loss: DPOLossConfig = field(default_factory=DPOLossConfig)
    reference: PairReferenceConfig = only_with(
        field(default_factory=PairReferenceConfig),
        Reader("loss.kind", tuple(each for each in DPOLossKind if each.needs.reference)),
        is_refused=True,
    )
    trainer: PreferenceTrainerConfig = field(default_factory=PreferenceTrainerConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelRunConfig(PreferenceConfig):
    """The configuration of a reward model's training. `actor` is the trained reward model."""

    kind: RunKind = RunKind.reward_model  # required
    data: RatedPreferenceDataConfig = field(default_factory=RatedPreferenceDataConfig)
    loss: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)
    trainer: PreferenceTrainerConfig = field(default_factory=PreferenceTrainerConfig)


SCHEMAS: Mapping[RunKind, type[RunConfig]] = {
    RunKind.ppo: PPOConfig,
    RunKind.sft: SFTConfig,
    RunKind.dpo: DPOConfig,
    RunKind.reward_model: RewardModelRunConfig,
}
