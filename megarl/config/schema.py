"""The typed schema of a run: frozen dataclasses, one per section, with their defaults and their own checks.

A check that needs only one section lives in its `__post_init__`; checks across sections live in `validate.py`.
This module imports no torch, so that `megarl check` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

MISSING = "???"  # OmegaConf's mark for a value that the user must give


class DType(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Overlong(str, Enum):
    refuse = "refuse"
    filter = "filter"


class OverlongConversation(str, Enum):
    """What happens to a conversation of more tokens than the reward model reads. Truncated ones are counted in a metric."""

    refuse = "refuse"
    truncate = "truncate"  # the oldest tokens are left out


class Recompute(str, Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Decay(str, Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class AdvantageEstimator(str, Enum):
    gae = "gae"
    grpo = "grpo"
    grpo_pass_k = "grpo_pass_k"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    opo = "opo"
    gpg = "gpg"
    remax = "remax"
    gdpo = "gdpo"
    optimal_token_baseline = "optimal_token_baseline"


class PolicyLossKind(str, Enum):
    ppo_clip = "ppo_clip"
    gspo = "gspo"
    gmpo = "gmpo"
    cispo = "cispo"
    sapo = "sapo"
    gpg = "gpg"
    clip_cov = "clip_cov"
    kl_cov = "kl_cov"
    dppo_tv = "dppo_tv"
    dppo_kl = "dppo_kl"


class Aggregation(str, Enum):
    token_mean = "token_mean"
    sequence_mean_token_sum = "sequence_mean_token_sum"
    sequence_mean_token_mean = "sequence_mean_token_mean"
    sequence_mean_token_sum_norm = "sequence_mean_token_sum_norm"


class KLWhere(str, Enum):
    none = "none"
    reward = "reward"
    loss = "loss"


class KLEstimator(str, Enum):
    k1 = "k1"
    abs_k1 = "abs_k1"
    k2 = "k2"
    k3 = "k3"
    # The value of the estimator with the gradient of k2, which is that of the divergence: for the loss.
    k1_straight_through = "k1_straight_through"
    abs_k1_straight_through = "abs_k1_straight_through"
    k3_straight_through = "k3_straight_through"


class KLControllerKind(str, Enum):
    fixed = "fixed"
    adaptive = "adaptive"


class CorrectionLevel(str, Enum):
    """What a weight trainer / rollout policy is taken over."""

    none = "none"
    token = "token"
    sequence = "sequence"  # the product over a response
    geometric = "geometric"  # the geometric mean over a response


class CorrectionKind(str, Enum):
    truncate = "truncate"  # a weight above `high` becomes `high`
    mask = "mask"  # a weight outside [low, high] becomes 0


class RejectionEstimator(str, Enum):
    none = "none"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class RejectionLevel(str, Enum):
    sequence = "sequence"  # the sum over a response
    geometric = "geometric"  # the mean over a response's tokens


class RolloutEngineKind(str, Enum):
    hf = "hf"
    sglang = "sglang"


class SGLangMode(str, Enum):
    engine = "engine"  # in the process of the rollout worker
    server = "server"  # an HTTP server that the worker starts


class PlacementStrategy(str, Enum):
    split_collocate = "split_collocate"  # actor and reference, critic and reward, rollout: side by side
    hybrid = "hybrid"  # as split_collocate, but the rollout takes turns with the actor on its devices
    fully_collocate = "fully_collocate"  # all roles take turns on the same devices
    stand_alone = "stand_alone"  # each role has devices of its own
    custom = "custom"  # as `roles` and `pools` say


class OverBudget(str, Enum):
    refuse = "refuse"
    warn = "warn"


class Transport(str, Enum):
    auto = "auto"  # colocated where trainer and engines share a node or devices, else broadcast
    colocated = "colocated"  # shared memory on CPU, CUDA IPC on CUDA
    broadcast = "broadcast"
    disk = "disk"


class Verify(str, Enum):
    off = "off"
    first = "first"
    always = "always"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder (`config.json`, safetensors, tokenizer)."""

    path: str = MISSING
    trust_remote_code: bool = False
    dtype: DType = DType.bfloat16


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_files: list[str] = MISSING  # type: ignore[assignment]
    val_files: list[str] = field(default_factory=list)
    max_prompt_length: int = 1024
    max_response_length: int = 1024
    overlong: Overlong = Overlong.refuse
    shuffle: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    estimator: AdvantageEstimator = AdvantageEstimator.gae
    gamma: float = 1.0
    lam: float = 1.0
    normalize_by_std: bool = True  # grpo, grpo_pass_k: divide by the group's deviation; false is Dr. GRPO (Liu et al. 2025)


@dataclass(frozen=True, kw_only=True)
class SAPOConfig:
    """How sharply a ratio's weight falls away from 1; the larger for tokens that are to become less likely (Gao et al. 2025)."""

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05


@dataclass(frozen=True, kw_only=True)
class CovarianceConfig:
    """Which tokens clip_cov and kl_cov treat apart (Cui et al. 2025)."""

    share: float = 0.0002  # of a mini-batch's tokens
    low: float = 1.0  # clip_cov: the covariances that it draws from
    high: float = 5.0
    kl_coefficient: float = 1.0  # kl_cov


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    kind: PolicyLossKind = PolicyLossKind.ppo_clip
    # The ratio is kept in [1 - clip_low, 1 + clip_high]. gmpo: its logarithm in [-clip_low, clip_high]. dppo_*: limits of the divergence
    # for tokens that became less and more likely. sapo, gpg and kl_cov have no bounds.
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None  # ppo_clip: limit c > 1 of the ratio where A < 0 (Ye et al. 2020); dppo_*: limit of every ratio
    aggregation: Aggregation = Aggregation.token_mean
    norm_tokens: int | None = None  # sequence_mean_token_sum_norm: the constant that a row's sum is divided by
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    clip: float | None = 0.2


@dataclass(frozen=True, kw_only=True)
class KLControllerConfig:
    kind: KLControllerKind = KLControllerKind.fixed
    target: float = 0.1
    horizon: int = 10000  # samples


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    where: KLWhere = KLWhere.reward
    estimator: KLEstimator = KLEstimator.k1
    coefficient: float = 0.001
    controller: KLControllerConfig = field(default_factory=KLControllerConfig)


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """Responses are left out whose estimated KL(rollout || trainer), in nats, is outside [low, high]."""

    estimator: RejectionEstimator = RejectionEstimator.none
    level: RejectionLevel = RejectionLevel.geometric
    low: float | None = None  # for k1, which can be negative
    high: float = 0.01


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """The rollout engine's log-probs are not quite the trainer's: weights for the policy loss, and responses to leave out."""

    level: CorrectionLevel = CorrectionLevel.none
    kind: CorrectionKind = CorrectionKind.truncate
    low: float = 0.5  # mask
    high: float = 2.0
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    bypass: bool = False  # the rollout engine's log-probs are the old ones, so that the trainer does not compute them again

    @property
    def enabled(self) -> bool:
        return self.level is not CorrectionLevel.none or self.rejection.estimator is not RejectionEstimator.none


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """A penalty that grows over the last tokens of `data.max_response_length` (Yu et al. 2025, DAPO, eq. 13)."""

    buffer_share: float = 0.0  # of max_response_length, over which it grows; 0: no penalty
    penalty: float = 1.0  # of a response that fills max_response_length

    def buffer_tokens(self, max_response_length: int) -> int:
        """At least one where there is a share."""
        return max(1, round(self.buffer_share * max_response_length)) if self.buffer_share else 0


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Prompts whose samples all have the same score are dropped and others take their place (DAPO, section 3.2)."""

    enabled: bool = False
    max_generations: int = 4  # rounds of generation in one step, the first included


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coefficient: float = 0.0
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Megatron's parallel sizes of one role. `data_parallel_size` replicas of (tensor x pipeline) ranks."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    virtual_pipeline_parallel_size: int | None = None
    data_parallel_size: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad: float = 1.0  # by global norm; 0 switches it off
    warmup_steps: int = 0  # optimizer steps, linear from 0
    decay: Decay = Decay.constant
    min_lr: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """How a rank's rows are cut into micro-batches: by count, or by a budget of tokens. Exactly one is given."""

    sequences: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    recompute: Recompute = Recompute.none


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    path: str | None = None  # None: initialised from the policy's folder


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    recompute: Recompute = Recompute.none


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen policy. It shares the actor's processes and layout."""

    path: str | None = None  # None: the policy's folder
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """A Python function `(data_source, solution_str, ground_truth, extra_info) -> float` in a file."""

    path: str = MISSING
    name: str = "compute_score"
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a sequence-classification head of one number, of any family, tokenizer and layout: it reads the conversation
    by its own chat template. A sample's score is the functions' sum plus `weight` times the model's."""

    path: str | None = None  # None: functions alone
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    weight: float = 1.0
    max_length: int | None = None  # of its own tokens; None: as many as it has positions, and a micro-batch has room
    overlong: OverlongConversation = OverlongConversation.refuse


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    functions: list[RewardFunctionConfig] = field(default_factory=list)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    time_limit_s: float = 10.0
    max_error_rate: float = 0.0  # share of a batch's samples whose scoring may fail (scored as 0 and reported)
    num_processes: int = 2


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    mode: SGLangMode = SGLangMode.engine
    deterministic: bool = False  # on CUDA, kernels that give the same samples for the same seed, slower; on CPU always
    server_args: dict[str, Any] = field(default_factory=dict)  # SGLang's own options, by the names of its ServerArgs


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: RolloutEngineKind = RolloutEngineKind.hf
    num_replicas: int = 1
    tensor_parallel_size: int = 1
    n: int = 1  # samples per prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_concurrency: int = 256  # sequences that one replica generates at the same time
    restart_limit: int = 3  # replicas that may be started anew in one run
    health_limit_s: float = 120.0  # an engine that makes no progress for so long is taken for hung
    validation: SamplingConfig = field(default_factory=SamplingConfig)
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

    @property
    def training(self) -> SamplingConfig:
        """How training samples are drawn."""
        return SamplingConfig(n=self.n, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    strategy: PlacementStrategy = PlacementStrategy.split_collocate
    num_nodes: int = 1
    devices_per_node: int | None = None  # None: as many as the roles need
    roles: dict[str, str] = field(default_factory=dict)  # custom: role -> pool; the roles of one pool take turns
    pools: dict[str, list[int]] = field(default_factory=dict)  # custom: pool -> its devices on each node
    device_memory_gb: float | None = None  # of one device, in 2**30 bytes; None: nothing is compared with the plan's sum
    over_budget: OverBudget = OverBudget.refuse


@dataclass(frozen=True, kw_only=True)
class ReshardingConfig:
    bucket_mb: float = 512.0
    transport: Transport = Transport.auto
    verify: Verify = Verify.first  # compare checksums of every tensor, trainer and engine
    max_log_prob_difference: float = 0.1  # mean |trainer - engine| over the first batch's tokens, above which the run ends


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    packing: bool = True  # False: right-padded batches, kept as the reference
    log_prob_chunk_tokens: int = 1024  # logits are made for so many tokens at a time


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run's whole state is saved, where, and what a run that starts does with what is there."""

    dir: str | None = None  # None: `checkpoints` in `trainer.output_dir`
    every_steps: int = 0  # and after the last step; 0: only where SIGTERM ends the run
    keep: int = 2  # complete checkpoints; 0: all
    save_hf: bool = True  # the policy as a Hugging Face folder, in each checkpoint and at the end in `output_dir/huggingface`
    asynchronous: bool = True  # files are written while training goes on
    resume: str = "auto"  # auto: from the latest checkpoint, where there is one; disable; or the path of one


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    total_steps: int = 100
    prompts_per_step: int = 256
    updates_per_step: int = 1  # optimizer steps in one pass over a step's samples
    epochs_per_batch: int = 1
    critic_warmup_steps: int = 0
    validate_every_steps: int = 0  # 0: only where `validate_before` and the end ask for it
    validate_before: bool = True
    phase_time_limit_s: float = 1800.0
    seed: int = 0
    output_dir: str = "outputs/run"


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    loggers: list[str] = field(default_factory=lambda: ["console", "jsonl", "tensorboard"])
    project: str = "megarl"
    run_name: str | None = None
    log_generations: int = 8  # samples written per validation


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Everything of one RL run; a file in `configs/` is one of these."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    device: Device = Device.auto


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig:
    """Parquet rows with `messages`: a chat that ends with the assistant's answer, the only part that is trained."""

    train_files: list[str] = MISSING  # type: ignore[assignment]
    val_files: list[str] = field(default_factory=list)
    max_length: int = 2048
    overlong: Overlong = Overlong.refuse
    shuffle: bool = True
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig:
    total_steps: int = 100
    samples_per_step: int = 256
    validate_every_steps: int = 0
    phase_time_limit_s: float = 1800.0
    seed: int = 0
    output_dir: str = "outputs/sft"


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Everything of one supervised run. `actor` is the trained model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    resharding: ReshardingConfig = field(default_factory=ReshardingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    device: Device = Device.auto
