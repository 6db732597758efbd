"""The sections of a run's steps, checkpoints, tracking and compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.kinds import LoggerKind
from megarl.config.schema.algorithm import WITH_CRITIC
from megarl.config.schema.keys import PathKind, Reader, matters, names, only_with, ranged

# Values of `checkpoint.resume` besides the path of a checkpoint.
RESUME_AUTO = "auto"
RESUME_DISABLE = "disable"
_ENABLED = Reader(".enabled", example="true")


class RunKind(str, Enum):
    ppo = "ppo"  # reinforcement learning with any algorithm: `megarl train`
    sft = "sft"  # supervised fine-tuning
    dpo = "dpo"  # direct preference optimization of a policy on pairs of answers: `megarl train`
    reward_model = "reward_model"  # a reward model from pairs of answers: `megarl train`


class Device(str, Enum):
    auto = "auto"  # cuda if the cluster has GPUs, otherwise cpu
    cpu = "cpu"  # gloo
    cuda = "cuda"  # NCCL, one GPU for each process


class MetricMode(str, Enum):
    """Whether larger or smaller values of a metric are better."""

    max = "max"  # larger values are better
    min = "min"  # smaller values are better


class Layers(str, Enum):
    auto = "auto"  # transformer_engine on CUDA with bfloat16, if it is installed; otherwise local
    transformer_engine = "transformer_engine"  # the fused layers of Transformer Engine; CUDA only
    local = "local"  # layers of torch and megarl, on CUDA and CPU


class FlashAttention(str, Enum):
    fa2 = "fa2"  # FlashAttention 2, which is part of torch
    fa3 = "fa3"  # FlashAttention 3 for Hopper, from a build of flash_attn_3
    fa4 = "fa4"  # FlashAttention 4 for Hopper and Blackwell, from the package flash-attn-4


class CPCommType(str, Enum):
    """How context-parallel ranks exchange keys and values. The names are Megatron's."""

    auto = "auto"  # p2p where Transformer Engine computes the attention, otherwise all_gather
    all_gather = "all_gather"  # each rank gathers the keys and values of whole sequences
    # keys and values travel around a ring, overlapped with the attention; requires Transformer Engine's
    # layers, and share_prompts=false
    p2p = "p2p"


class RoutingReplay(str, Enum):
    """The source of the expert choices of each token in an update."""

    off = "off"  # the routers choose
    # replay the choices of the pass that computed `old_log_probs`, which a run with a single update per batch
    # may not have
    trainer = "trainer"
    rollout = "rollout"  # replay the choices of the rollout engine, also when computing `old_log_probs`


_GENERATING = Reader("rollout.engine")  # only kinds of run that generate have the key


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    layers: Layers = Layers.auto  # layer implementation; checkpoints and weights do not depend on it
    packing: bool = True  # pack sequences without padding; false: right-padded batches, a reference for tests
    # packed samples of one prompt in a micro-batch share its tokens, which are computed once
    share_prompts: bool = only_with(True, Reader(".packing", example="true"))
    # tokens whose logits are materialized at a time; null: 1024, or as many as fit in 64 MiB
    log_prob_chunk_tokens: int | None = ranged(None, at_least=1)
    # kernels of torch's flash attention on CUDA: shared prompts, context parallelism and local layers use it
    # (for other rows, Transformer Engine chooses kernels itself)
    flash_attention: FlashAttention = FlashAttention.fa2
    # how context-parallel ranks exchange keys and values
    cp_comm_type: CPCommType = only_with(
        CPCommType.auto,
        *(
            Reader(f"{section}.context_parallel_size", above=1, example="2")
            for section in (
                "actor.parallel",
                "critic.parallel",
                "teacher.parallel",
                "teachers[].parallel",
                "reward.model.parallel",
            )
        ),
    )
    # compute logits in float32 from 16-bit weights, in trainer and engine (SGLang's enable_fp32_lm_head), so
    # that log-probs are not rounded to 16 bits
    fp32_lm_head: bool = False
    # router replay of a mixture-of-experts actor
    routing_replay: RoutingReplay = only_with(
        only_with(RoutingReplay.off, Reader("model.path", architecture="experts"), is_refused=True),
        _GENERATING,
        is_refused=True,
    )


_METRIC = Reader(".metric", example="val/score/mean")


@dataclass(frozen=True, kw_only=True)
class KeepBestConfig:
    """Keeps the checkpoint with the best validation in addition to the newest ones."""

    # validation metric, such as val/score/mean, or val/loss of kind: sft; null: do not keep the best one
    metric: str | None = None
    mode: MetricMode = only_with(MetricMode.max, _METRIC)  # whether larger or smaller values are better


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig:
    """Ends a run whose validations do not improve, as if it had reached its last step."""

    # validation metric, such as val/score/mean, or val/loss of kind: sft; null: never stop early
    metric: str | None = None
    mode: MetricMode = only_with(MetricMode.max, _METRIC)  # whether larger or smaller values are better
    # consecutive validations without improvement that end the run
    patience: int = only_with(ranged(5, at_least=1), _METRIC)
    # an improvement must exceed this difference to the best value
    min_delta: float = only_with(ranged(0.0, at_least=0), _METRIC)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and where checkpoints of the full training state are saved, and how a run resumes from them."""

    # checkpoint folder; null: `checkpoints` in `trainer.output_dir`
    dir: str | None = field(default=None, metadata=names(PathKind.output))
    # steps between checkpoints; 0: do not save by steps
    every_steps: int = matters(ranged(0, at_least=0), "so that an interrupted run repeats few steps")
    # minutes between checkpoints, each saved at the end of a step; 0: do not save by time
    every_minutes: float = ranged(0.0, at_least=0)
    # save after the last step, so that training can be extended; SIGTERM and Ctrl-C always save
    at_end: bool = True
    keep: int = ranged(2, at_least=0)  # number of complete checkpoints to keep, the newest; 0: all
    keep_best: KeepBestConfig = field(default_factory=KeepBestConfig)
    # also save the policy as a Hugging Face folder, in each checkpoint and at the end in
    # `output_dir/huggingface`
    save_hf: bool = True
    asynchronous: bool = True  # write files in the background while training continues
    # URL of a folder to which each checkpoint is copied in the background, such as s3://bucket/run; null:
    # none
    upload: str | None = None
    # auto: resume from the latest checkpoint if there is one; disable: do not resume; or the path or URL of a
    # checkpoint
    resume: str = RESUME_AUTO


_VALIDATION = Reader("data.val_files", example="[FILE.parquet]")


def _output_dir(default: str) -> str:
    return matters(
        field(default=default, metadata=names(PathKind.output)), "always: another folder for each run"
    )


@dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """The keys of `trainer` that all kinds of run have."""

    # training steps: in RL, each generates samples, scores them and updates the policy; otherwise it is one
    # optimizer step
    total_steps: int = matters(ranged(100, at_least=1), "always: the length of the run")
    # steps between validations; 0: only at the end, and in RL before the first step (`validate_before`)
    validate_every_steps: int = only_with(ranged(0, at_least=0), _VALIDATION, is_refused=True)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    # time limit of a phase; exceeding it aborts the run and reports every rank's stack
    phase_time_limit_s: float = ranged(1800.0, at_least=1)
    # seed of newly initialized weights, and in RL of sampled tokens and mini-batches
    seed: int = ranged(0, at_least=0)
    # output folder of metrics, timeline, checkpoints and the trained model
    output_dir: str = _output_dir("outputs/run")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(StepsConfig):
    # prompts of a step, each with `rollout.n` samples
    prompts_per_step: int = matters(
        ranged(256, at_least=1), "larger for less noise, smaller for shorter steps"
    )
    # optimizer steps in one pass over a step's samples
    updates_per_step: int = matters(
        ranged(1, at_least=1),
        "2 to 16 to learn more from each step; fewer if `actor/approx_kl` is high",
    )
    epochs_per_batch: int = ranged(1, at_least=1)  # passes over a step's samples
    # initial steps that train only the critic
    critic_warmup_steps: int = only_with(
        ranged(0, at_least=0),
        WITH_CRITIC,
        is_refused=True,
    )
    # validate before the first step
    validate_before: bool = only_with(True, _VALIDATION, is_usual=True)

    @property
    def one_update(self) -> bool:
        """Whether a step makes a single optimizer step."""
        return self.updates_per_step * self.epochs_per_batch == 1


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig(StepsConfig):
    samples_per_step: int = ranged(256, at_least=1)  # conversations per optimizer step
    output_dir: str = _output_dir("outputs/sft")


@dataclass(frozen=True, kw_only=True)
class PreferenceTrainerConfig(StepsConfig):
    pairs_per_step: int = ranged(128, at_least=1)  # pairs of answers per optimizer step
    output_dir: str = _output_dir("outputs/preferences")


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    # loggers that receive the metrics; see Tracking
    loggers: list[LoggerKind] = field(
        default_factory=lambda: [LoggerKind.console, LoggerKind.jsonl, LoggerKind.tensorboard]
    )
    # project of the run in wandb and swanlab; experiment in mlflow
    project: str = only_with(
        "megarl", Reader(".loggers", (LoggerKind.wandb, LoggerKind.swanlab, LoggerKind.mlflow))
    )
    run_name: str | None = None  # name of the run in the loggers; null: the name of `trainer.output_dir`
    # address on which the logger prometheus listens
    prometheus_host: str = only_with("127.0.0.1", Reader(".loggers", (LoggerKind.prometheus,)))
    # port of the logger prometheus; 0: a free one
    prometheus_port: int = only_with(
        ranged(9464, at_least=0, at_most=65535), Reader(".loggers", (LoggerKind.prometheus,))
    )
    # collector that the logger opentelemetry sends traces to, such as http://collector:4318; null:
    # OTEL_EXPORTER_OTLP_ENDPOINT, or port 4318 of this machine
    otlp_endpoint: str | None = only_with(None, Reader(".loggers", (LoggerKind.opentelemetry,)))
    # samples written per validation
    log_generations: int = only_with(only_with(ranged(8, at_least=0), _VALIDATION), _GENERATING)
    # steps between files of samples in `samples/`, in addition to the first and last step; 0: none. Beyond
    # 4 GiB, files are thinned evenly over the run
    samples_every_steps: int = only_with(ranged(10, at_least=0), _GENERATING)
    # newest steps whose training batches are kept in `batches/`, for `megarl replay`; 0: none
    record_batches: int = ranged(0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Selects the steps, models and ranks that write a profiler trace to `profile/` of the run."""

    steps: list[int] = field(default_factory=list)  # steps that are profiled, from 1; empty: none
    # models, such as actor, critic or reference
    roles: list[str] = only_with(field(default_factory=lambda: ["actor"]), Reader(".steps", example="[3]"))
    # ranks of each of these models, from 0
    ranks: list[int] = only_with(field(default_factory=lambda: [0]), Reader(".steps", example="[3]"))


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How a run continues after it loses a process of a trained model.

    The lost process and its peers are started again with a snapshot in host memory, and repeat the steps
    since then. The result is bitwise identical to that of a run which lost nothing.
    """

    # restart lost trainer processes; false: the run ends, and the same command resumes from a checkpoint
    enabled: bool = False
    # steps between snapshots of the training state in host memory; the samples of these steps are kept, too
    snapshot_every_steps: int = only_with(ranged(1, at_least=1), _ENABLED)
    # recoveries within ten steps; one more ends the run
    max_restarts: int = only_with(ranged(3, at_least=1), _ENABLED)
    # how long a run that lost a node waits until the cluster has another free one, in seconds
    wait_for_node_s: float = only_with(ranged(300.0, at_least=0), _ENABLED)
    # when a node is lost and no other is free, continue with fewer data-parallel replicas instead of waiting;
    # results then equal those of the undisturbed run only up to rounding
    allow_fewer_replicas: bool = only_with(False, _ENABLED)
    # optimizer steps between bitwise comparisons of weights that several ranks hold; a rank whose copy
    # differs counts as lost; 0: never
    check_replicas_every: int = ranged(0, at_least=0)
    # a call of a model that takes longer than this multiple of the median of its earlier calls, and than
    # 10 s, counts as hung; 0: only `trainer.phase_time_limit_s` applies
    hang_factor: float = ranged(0.0, at_least=0)
    # a rank that takes longer than this multiple of its peers' time for the same small computation, in each
    # of eight updates in a row, is reported as slow; 0: never
    straggler_factor: float = ranged(1.5, at_least=0)


class PlacementStrategy(str, Enum):
    # three pools of devices: actor and reference, critic and reward, rollout
    split_collocate = "split_collocate"
    hybrid = "hybrid"  # as split_collocate, but the rollout shares the actor's devices in time
    fully_collocate = "fully_collocate"  # all roles share the same devices in time
    stand_alone = "stand_alone"  # each role has its own devices
    custom = "custom"  # as specified by `roles` and `pools`


class OverBudget(str, Enum):
    refuse = "refuse"  # the run does not start; the error names the device
    warn = "warn"  # the run logs a warning and continues


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    # see Placements
    strategy: PlacementStrategy = matters(
        PlacementStrategy.split_collocate, "`hybrid`, if actor and engines share all devices in turn"
    )
    # nodes over which the pools are spread
    num_nodes: int = matters(ranged(1, at_least=1, at_most=10000), "the size of your cluster")
    # devices of each node; null: as many as the roles need
    devices_per_node: int | None = ranged(None, at_least=1, at_most=128)
    # the pool of each role; the roles of a pool share its devices in time
    roles: dict[str, str] = only_with(
        field(default_factory=dict), Reader(".strategy", (PlacementStrategy.custom,)), is_refused=True
    )
    # the devices of each pool, as its number of devices on each node
    pools: dict[str, list[int]] = only_with(
        field(default_factory=dict), Reader(".strategy", (PlacementStrategy.custom,)), is_refused=True
    )
    # memory budget of one device, in 2**30 bytes; null: the plan's estimate is not checked
    device_memory_gb: float | None = matters(
        ranged(None, above=0), "about 90 % of a device's memory, so that a run that does not fit is refused"
    )
    # peak of one device, for `perf/mfu/*`; null: the bfloat16 peak of a known GPU
    device_peak_tflops: float | None = ranged(None, above=0)
    # kind of device, for predicted step times: a name in configs/devices, or a file of
    # `tune --calibrate`, relative to the current folder; null: a run logs no prediction
    device_profile: str | None = None
    # how to handle a device whose estimate exceeds its memory
    over_budget: OverBudget = only_with(OverBudget.refuse, Reader(".device_memory_gb", example="72"))
