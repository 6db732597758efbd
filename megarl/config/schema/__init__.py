"""The typed schema of a run: frozen dataclasses, one per section, with their defaults and their own checks.

A check that needs only one section lives in its `__post_init__`. Checks across sections live in
`validate.py`. Choices that have requirements declare them in `megarl/config/kinds.py`. Nothing here imports
torch, so `megarl check` starts quickly.

`docs/configuration.md` is generated from these modules: the comment after or above a key, and the docstrings
of sections and choices, are the text of that page.
"""

from __future__ import annotations

from megarl.config.kinds import (
    AdvantageEstimator,
    Aggregation,
    DPOLossKind,
    LoggerKind,
    PolicyLossKind,
    RolloutEngineKind,
    Transport,
)
from megarl.config.schema.agent import (
    AgentConfig,
    CallsInThinking,
    EnvironmentConfig,
    HarnessConfig,
    SandboxConfig,
    SandboxProvider,
)
from megarl.config.schema.algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionKind,
    CorrectionLevel,
    CovarianceConfig,
    DistillationConfig,
    DistillationKL,
    DPOLossConfig,
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
    RewardModelLossConfig,
    RolloutCorrectionConfig,
    SAPOConfig,
    ValueLossConfig,
    VESPOConfig,
)
from megarl.config.schema.data import (
    ChatColumnsConfig,
    CurriculumConfig,
    CurriculumKind,
    DataConfig,
    LossyText,
    Overlong,
    PairColumnsConfig,
    PreferenceDataConfig,
    PromptColumnsConfig,
    RatedPairColumnsConfig,
    RatedPreferenceDataConfig,
    SFTDataConfig,
)
from megarl.config.schema.keys import MISSING
from megarl.config.schema.models import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    Decay,
    DType,
    ExpertsConfig,
    FrozenMegatronConfig,
    LoRAConfig,
    LoRASync,
    MegatronConfig,
    MicroBatchConfig,
    ModelConfig,
    OnNonFinite,
    OptimConfig,
    PairReferenceConfig,
    ParallelConfig,
    RankCoordinate,
    Recomputation,
    Recompute,
    RecomputeModule,
    ReferenceConfig,
    SourceTeacherConfig,
    SparseAttentionConfig,
    TeacherConfig,
)
from megarl.config.schema.reward import (
    JudgeConfig,
    JudgeParseConfig,
    OverlongConversation,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RewardSandboxConfig,
)
from megarl.config.schema.rollout import (
    ATTENTION_GROUPS,
    EngineDType,
    Late,
    OnUpdate,
    ReshardingConfig,
    RolloutConfig,
    SamplingConfig,
    SGLangConfig,
    SGLangMode,
    Verify,
)
from megarl.config.schema.run import (
    RESUME_AUTO,
    RESUME_DISABLE,
    CheckpointConfig,
    CPCommType,
    Device,
    EarlyStopConfig,
    EngineConfig,
    FlashAttention,
    KeepBestConfig,
    Layers,
    MetricMode,
    OverBudget,
    PlacementConfig,
    PlacementStrategy,
    PreferenceTrainerConfig,
    ProfileConfig,
    RecoveryConfig,
    RoutingReplay,
    RunKind,
    SFTTrainerConfig,
    TrackingConfig,
    TrainerConfig,
)
from megarl.config.schema.run_config import (
    SCHEMAS,
    DPOConfig,
    PPOConfig,
    PreferenceConfig,
    RewardModelRunConfig,
    RunConfig,
    SFTConfig,
)
