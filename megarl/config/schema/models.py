"""The policy's folder, and how each role's model is laid out, trained and cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.schema.missing import MISSING


class DType(str, Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Recompute(str, Enum):
    none = "none"
    selective = "selective"
    full = "full"


class Decay(str, Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder (`config.json`, safetensors, tokenizer)."""

    path: str = MISSING
    trust_remote_code: bool = False
    dtype: DType = DType.bfloat16


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
