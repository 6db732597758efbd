"""The sections `rollout` and `resharding`: generation engines, sampling and weight sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.kinds import RolloutEngineKind, Transport
from megarl.config.schema.keys import Reader, matters, naming, only_with, ranged


class EngineDType(str, Enum):
    model = "model"  # model.dtype
    # projections in float8_e4m3fn with a float32 scale for each block of 128 x 128; the rest in model.dtype
    fp8 = "fp8"


class SGLangMode(str, Enum):
    engine = "engine"  # SGLang runs in the rollout worker's process
    server = "server"  # the worker starts an HTTP server


class OnUpdate(str, Enum):
    continue_ = "continue"  # samples in flight continue with the new weights
    drain = "drain"  # samples in flight finish first, so each has a single weight version; the trainer waits


class Late(str, Enum):
    wait = "wait"  # each prompt belongs to a fixed step, which waits for it
    # a step takes the oldest finished prompts; tokens older than max_staleness are masked out of the loss
    mask = "mask"


class Verify(str, Enum):
    off = "off"  # never
    first = "first"  # after the first weight sync
    always = "always"  # after each weight sync


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    n: int = ranged(1, at_least=1)  # samples per prompt
    temperature: float = ranged(1.0, at_least=0, at_most=100)  # sampling temperature; 0 is greedy
    # nucleus sampling: probability mass of the most likely tokens to sample from; 1: all tokens
    top_p: float = ranged(1.0, above=0, at_most=1)
    top_k: int = -1  # number of most likely tokens to sample from; -1: all tokens
    min_new_tokens: int = ranged(0, at_least=0)  # minimum tokens before the end token is allowed


# SGLang's argument for data-parallel attention.
ATTENTION_GROUPS = "attn_dp_size"


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    mode: SGLangMode = SGLangMode.engine  # where SGLang runs
    # SGLang options, by their names in ServerArgs, such as enable_deterministic_inference: true for slower
    # kernels on CUDA that give the same samples for the same seed; a CPU always has them
    server_args: dict[str, Any] = field(default_factory=dict, metadata=naming("speculative_draft_model_path"))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: RolloutEngineKind = matters(RolloutEngineKind.hf, "`sglang` on GPUs")  # generation engine
    dtype: EngineDType = EngineDType.model  # dtype of the engine's weights
    # engines, each with a full copy of the model
    num_replicas: int = matters(
        ranged(1, at_least=1, at_most=10000), "devices of the rollout / devices of an engine"
    )
    # devices of each pipeline stage of an engine, which shard every weight matrix of its layers
    tensor_parallel_size: int = matters(
        ranged(1, at_least=1, at_most=1024),
        "if the model and the cache of its sequences do not fit a device",
    )
    # pipeline stages of an engine, over which its layers are distributed
    pipeline_parallel_size: int = ranged(1, at_least=1, at_most=1024)
    # groups of an engine's devices over which whole experts are distributed
    expert_parallel_size: int = only_with(
        ranged(1, at_least=1, at_most=1024),
        Reader("model.path", architecture="experts"),
        is_refused=True,
    )
    # samples per prompt
    n: int = matters(ranged(1, at_least=1), "8 or more, if the algorithm compares the samples of a prompt")
    # sampling temperature, above 0; the trainer divides its logits by it too
    temperature: float = matters(
        ranged(1.0, at_least=0, at_most=100), "rarely: above 1 if the samples of a prompt are too similar"
    )
    max_concurrency: int = ranged(256, at_least=1)  # sequences that one replica generates concurrently
    # steps that generation may run ahead of training (async rollout); 0: it waits for new weights
    max_staleness: int = ranged(0, at_least=0, at_most=64)
    # how to handle samples in flight when new weights arrive
    on_update: OnUpdate = only_with(OnUpdate.continue_, Reader(".max_staleness", example="1"))
    # how to handle prompts that are not finished when their step begins
    late: Late = only_with(
        only_with(
            Late.wait,
            Reader(".on_update", (OnUpdate.continue_,)),
            is_refused=True,
            why="no sample is masked",
        ),
        Reader(".max_staleness", example="1"),
        is_refused=True,
        why="no sample is masked",
    )
    # fraction of a step's prompts that may be dropped and replaced if an engine cannot generate their samples
    max_error_rate: float = ranged(0.0, at_least=0, at_most=1)
    restart_limit: int = ranged(3, at_least=0)  # replica restarts allowed within a day
    # seconds without progress after which an engine is considered hung
    health_limit_s: float = ranged(120.0, at_least=1)
    validation: SamplingConfig = only_with(
        field(default_factory=SamplingConfig), Reader("data.val_files", example="[FILE.parquet]")
    )
    sglang: SGLangConfig = only_with(
        field(default_factory=SGLangConfig), Reader(".engine", (RolloutEngineKind.sglang,))
    )

    @property
    def devices_per_engine(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def attention_groups(self) -> int:
        """The groups of an engine's devices that each compute the attention of their own sequences."""
        return int(self.sglang.server_args.get(ATTENTION_GROUPS) or 1)

    @property
    def training(self) -> SamplingConfig:
        """The sampling settings of training samples."""
        return SamplingConfig(n=self.n, temperature=self.temperature)

    def settings_of(self, engine: RolloutEngineKind) -> SGLangConfig | None:
        """Return the section of an engine; None if it has none."""
        return None if engine.needs.section is None else getattr(self, engine.needs.section)

    def memory_share_of(self, engine: RolloutEngineKind) -> Any:
        """Return the configured share of a GPU that an engine reserves for weights and cache, or None."""
        settings = self.settings_of(engine)
        argument = engine.needs.memory_arg
        return None if settings is None or argument is None else settings.server_args.get(argument)


@dataclass(frozen=True, kw_only=True)
class ReshardingConfig:
    # size of a transfer bucket of weights per rank, in 2**20 bytes; a weight sync takes two or three times as
    # much device memory
    bucket_mb: float = ranged(512.0, above=0, at_most=65536)
    transport: Transport = Transport.auto  # how weights are sent from trainer to engines
    # whether to send only elements whose bits changed since an engine's last weights; transports group and
    # folder only
    delta: bool = False
    verify: Verify = Verify.first  # when to compare the checksums of every tensor in trainer and engine
    # maximum mean |trainer - engine| log-prob over the first batch's tokens; the run fails above it
    max_log_prob_difference: float = ranged(0.1, above=0)
