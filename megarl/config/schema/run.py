"""The course of a run: its steps, its checkpoints, what it writes down, and the device that it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.kinds import LoggerKind
from megarl.config.schema.keys import ranged, written

# what `checkpoint.resume` is beside the path of a checkpoint
RESUME_AUTO = "auto"
RESUME_DISABLE = "disable"


class RunKind(str, Enum):
    ppo = "ppo"  # reinforcement learning, by any algorithm: `megarl train`
    sft = "sft"  # supervised fine-tuning: `megarl train` or `megarl sft`


class Device(str, Enum):
    auto = "auto"  # cuda where the cluster has GPUs
    cpu = "cpu"  # gloo
    cuda = "cuda"  # NCCL, one GPU for each process


class MetricMode(str, Enum):
    """Which of two values of a metric is the better one."""

    max = "max"  # the larger
    min = "min"  # the smaller


class Layers(str, Enum):
    auto = "auto"  # transformer_engine on CUDA where it is installed, for bfloat16; else local
    transformer_engine = "transformer_engine"  # the fused layers of NVIDIA's package; CUDA only
    local = "local"  # torch's and megarl's own, on CUDA and on a CPU


class RoutingReplay(str, Enum):
    """Which experts an update sends a token to."""

    off = "off"  # those that its routers choose
    # those of the pass that computed `old_log_probs`, which must be there: not with one update per batch
    # alone
    trainer = "trainer"
    rollout = "rollout"  # those of the engine that wrote it; `old_log_probs` are of these too


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    layers: Layers = Layers.auto  # of which the models are built; checkpoints and weights do not depend on it
    packing: bool = True  # False: right-padded batches, kept as the reference
    # samples of one prompt in a micro-batch have its tokens once, if they are packed
    share_prompts: bool = True
    # tokens whose logits exist at a time; None: 1024, or what 64 MiB hold
    log_prob_chunk_tokens: int | None = ranged(None, at_least=1)
    routing_replay: RoutingReplay = RoutingReplay.off  # of an actor with experts


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig:
    """The checkpoint of the best validation is kept beside the newest ones."""

    # of validation, as val/score/mean, or val/loss of `megarl sft`; None: no best one is kept
    metric: str | None = None
    mode: MetricMode = MetricMode.max  # which value is the better one


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig:
    """A run whose validations get no better ends, as if it had come to its last step."""

    # of validation, as val/score/mean, or val/loss of `megarl sft`; None: the run makes all its steps
    metric: str | None = None
    mode: MetricMode = MetricMode.max  # which value is the better one
    patience: int = ranged(5, at_least=1)  # so many validations in a row without a better value end the run
    min_delta: float = ranged(0.0, at_least=0)  # a value is better than the best one before by more than this


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When a run's whole state is saved, where, and what a run that starts does with what is there."""

    dir: str | None = field(default=None, metadata=written())  # None: `checkpoints` in `trainer.output_dir`
    every_steps: int = ranged(0, at_least=0)  # 0: not by the number of the step
    # after the step in which so much time has passed since the last one; 0: not by time
    every_minutes: float = ranged(0.0, at_least=0)
    at_end: bool = True  # after the last step, so that the run can be trained on; SIGTERM saves in any case
    keep: int = ranged(2, at_least=0)  # the newest complete checkpoints; 0: all
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    # the policy as a Hugging Face folder, in each checkpoint and at the end in `output_dir/huggingface`
    save_hf: bool = True
    asynchronous: bool = True  # files are written while training continues
    # auto: from the latest checkpoint, where there is one; disable; or the path of one
    resume: str = RESUME_AUTO


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    total_steps: int = ranged(100, at_least=1)  # each generates, scores and learns once
    prompts_per_step: int = ranged(256, at_least=1)  # times `rollout.n` samples
    updates_per_step: int = ranged(1, at_least=1)  # optimizer steps in one pass over a step's samples
    epochs_per_batch: int = ranged(1, at_least=1)  # passes over a step's samples
    critic_warmup_steps: int = ranged(0, at_least=0)  # first steps, in which only the critic learns
    # 0: only where `validate_before` and the end ask for it
    validate_every_steps: int = ranged(0, at_least=0)
    validate_before: bool = True  # validate before the first step
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    # a phase that takes longer ends the run, with every rank's stack
    phase_time_limit_s: float = ranged(1800.0, at_least=1)
    seed: int = ranged(0, at_least=0)  # of sampled tokens, mini-batches and new weights
    # metrics, timeline, checkpoints, the trained model
    output_dir: str = field(default="outputs/run", metadata=written())

    @property
    def one_update(self) -> bool:
        """A step makes a single optimizer step."""
        return self.updates_per_step * self.epochs_per_batch == 1


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig:
    total_steps: int = ranged(100, at_least=1)  # optimizer steps
    samples_per_step: int = ranged(256, at_least=1)  # chats of one optimizer step
    validate_every_steps: int = ranged(0, at_least=0)  # 0: only at the end
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    # a phase that takes longer ends the run, with every rank's stack
    phase_time_limit_s: float = ranged(1800.0, at_least=1)
    seed: int = ranged(0, at_least=0)  # of new weights
    # metrics, timeline, checkpoints, the trained model
    output_dir: str = field(default="outputs/sft", metadata=written())


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    # where the metrics of a run go; see the page on loggers
    loggers: list[LoggerKind] = field(
        default_factory=lambda: [LoggerKind.console, LoggerKind.jsonl, LoggerKind.tensorboard]
    )
    project: str = "megarl"  # of the run in wandb and swanlab; the experiment in mlflow
    run_name: str | None = None  # there; None: the name of `trainer.output_dir`
    log_generations: int = ranged(8, at_least=0)  # samples written per validation
    # steps whose samples are kept in `samples/`, beside the first and the last; 0: none
    samples_every_steps: int = ranged(10, at_least=0)
    # 2**30 bytes; beyond it, files of steps in between go, and what is left spans the run
    samples_max_gb: float = ranged(4.0, above=0)
