"""The typed schema of a run: frozen dataclasses, one per section, with their defaults and their own checks.

A check that needs only one section lives in its `__post_init__`; checks across sections live in `validate.py`.
Choices that need something of a run declare it in `megarl/config/kinds.py`. Nothing here imports torch, so that `megarl check` answers at
once. `docs/configuration.md` is made from these modules: a comment behind a key or above it, a docstring of a section and of a choice are
what a user reads there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.kinds import AdvantageEstimator, Aggregation, LoggerKind, PolicyLossKind, RolloutEngineKind
from megarl.config.schema.agent import AgentConfig, CallsInThinking, EnvironmentConfig, ToolConfig
from megarl.config.schema.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionKind,
    CorrectionLevel,
    CovarianceConfig,
    DynamicSamplingConfig,
    KLConfig,
    KLControllerConfig,
    KLControllerKind,
    KLEstimator,
    KLWhere,
    OverlongConfig,
    PolicyLossConfig,
    RejectionConfig,
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrectionConfig,
    SAPOConfig,
    ValueLossConfig,
)
from megarl.config.schema.data import ChatColumnsConfig, DataConfig, LossyText, Overlong, PromptColumnsConfig, SFTDataConfig
from megarl.config.schema.keys import MISSING
from megarl.config.schema.models import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    Decay,
    DType,
    ExpertsConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RankCoordinate,
    Recomputation,
    Recompute,
    RecomputeModule,
    ReferenceConfig,
)
from megarl.config.schema.placement import OverBudget, PlacementConfig, PlacementStrategy
from megarl.config.schema.reward import (
    OverlongConversation,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RewardSandboxConfig,
)
from megarl.config.schema.rollout import (
    Late,
    OnUpdate,
    ReshardingConfig,
    RolloutConfig,
    SamplingConfig,
    SGLangConfig,
    SGLangMode,
    Transport,
    Verify,
)
from megarl.config.schema.run import (
    RESUME_AUTO,
    RESUME_DISABLE,
    CheckpointConfig,
    Device,
    EarlyStopConfig,
    EngineConfig,
    KeepBestConfig,
    Layers,
    MetricMode,
    RoutingReplay,
    RunKind,
    SFTTrainerConfig,
    TrackingConfig,
    TrainerConfig,
)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Everything of one RL run."""

    kind: RunKind = RunKind.ppo  # what the run is, so that every command knows which keys its file may have
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    device: Device = Device.auto  # what the run's processes compute on


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Everything of one supervised run. `actor` is the trained model."""

    kind: RunKind = RunKind.sft  # must be given, but for `megarl sft`
    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    device: Device = Device.auto  # what the run's processes compute on
