"""The policy's folder, and how each role's model is laid out, trained and cut into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from megarl.config.schema.keys import MISSING, InputKind, names, numbers, ranged


class DType(str, Enum):
    # bfloat16 on CUDA; float32 on a CPU, where most processors compute bfloat16 many times as slowly
    auto = "auto"
    float32 = "float32"  # four bytes
    bfloat16 = "bfloat16"  # two bytes; the optimizer keeps float32 copies


class Recompute(str, Enum):
    none = "none"  # all activations are kept
    selective = "selective"  # those inside `recompute_modules` are computed again in the backward pass
    full = "full"  # those of whole layers are: the least memory


class RecomputeModule(str, Enum):
    """Megatron's names. `layernorm` is not among them: Transformer Engine's layers have none by itself, and
    for others Megatron needs that package."""

    core_attn = "core_attn"  # attention between its linear layers; on CUDA its kernels keep little anyway
    mlp = "mlp"  # the MLP, whose activations are the most of a layer


class Recomputation(NamedTuple):
    """What is computed again in the backward pass, as the keys of a role say it."""

    how: Recompute = Recompute.none
    modules: tuple[RecomputeModule, ...] = (RecomputeModule.core_attn,)
    num_layers: int | None = None


class Decay(str, Enum):
    constant = "constant"  # the rate stays at `lr`
    linear = "linear"  # down to `min_lr` at the last step
    cosine = "cosine"  # the same on half a cosine


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder (`config.json`, safetensors, tokenizer)."""

    path: str = field(default=MISSING, metadata=names(InputKind.data))  # of the folder
    trust_remote_code: bool = False  # run the Python files in the folder: only where you trust who made it
    dtype: DType = DType.auto  # of weights and activations, in trainer and engine


class RankCoordinate(NamedTuple):
    """Where a rank of a role stands: which tensor-parallel part, which part of the tokens, which replica,
    which stage."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Megatron's parallel sizes of one role. `data_parallel_size` replicas of (tensor x context x pipeline)
    ranks."""

    # ranks that share each layer's matrices, on one node
    tensor_parallel_size: int = ranged(1, at_least=1, at_most=1024)
    pipeline_parallel_size: int = ranged(1, at_least=1, at_most=1024)  # stages of consecutive layers
    # pieces of layers that a stage holds, so that stages wait less
    virtual_pipeline_parallel_size: int | None = ranged(None, at_least=2)
    # ranks that share the tokens of each row, for long rows
    context_parallel_size: int = ranged(1, at_least=1, at_most=1024)
    data_parallel_size: int = ranged(1, at_least=1, at_most=10000)  # replicas, each with a share of the batch
    sequence_parallel: bool = False  # between matrices, tensor-parallel ranks share the tokens: less memory
    # ranks of a stage that share the experts, whatever replica they are in
    expert_parallel_size: int = ranged(1, at_least=1, at_most=1024)
    # ranks that share each expert's matrices
    expert_tensor_parallel_size: int = ranged(1, at_least=1, at_most=1024)

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline_parallel_size

    @property
    def replica_size(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tensor_parallel_size * self.num_copies

    @property
    def num_copies(self) -> int:
        """Ranks that hold the same parameters, whose gradients are added and who share the optimizer's
        state."""
        return self.context_parallel_size * self.data_parallel_size

    @property
    def micro_batch_multiple(self) -> int:
        """A pass has so many micro-batches, or a multiple: virtual stages take turns with whole rounds of
        them."""
        return 1 if self.virtual_pipeline_parallel_size is None else self.pipeline_parallel_size

    def coordinate(self, rank: int) -> RankCoordinate:
        """As Megatron counts: tensor-parallel ranks fastest, then those that share rows, then replicas, then
        stages."""
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        rest, context = divmod(rest, self.context_parallel_size)
        stage, replica = divmod(rest, self.data_parallel_size)
        return RankCoordinate(tp=tensor, cp=context, dp=replica, pp=stage)

    @property
    def expert_data_parallel_size(self) -> int:
        """Copies of each expert."""
        return self.stage_size // (self.expert_parallel_size * self.expert_tensor_parallel_size)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = ranged(1e-6, above=0, at_most=1)  # after the warm-up
    betas: list[float] = numbers([0.9, 0.95], at_least=0, below=1)  # Adam's two moments
    eps: float = ranged(1e-8, above=0, at_most=1)  # Adam's
    weight_decay: float = ranged(0.01, at_least=0)  # decoupled (AdamW); not on norms and biases
    clip_grad: float = ranged(1.0, at_least=0)  # by global norm; 0 switches it off
    warmup_steps: int = ranged(0, at_least=0)  # optimizer steps, linear from 0
    decay: Decay = Decay.constant  # of the rate, from the warm-up to the last step
    min_lr: float = ranged(0.0, at_least=0)  # where the decay ends


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """How a rank's rows are cut into micro-batches: by count, or by a budget of tokens. Exactly one is
    given."""

    sequences: int | None = ranged(None, at_least=1)  # so many rows at a time
    # as many rows as give a rank so many tokens: the lever on activation memory
    max_tokens: int | None = ranged(None, at_least=1)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """How the routers of a model with experts are trained. The field trains policies without losses of their
    own: they pull log-probs away from those that generated the samples."""

    # Of the load-balancing loss, in each layer E * sum over experts of (share of tokens) * (mean
    # probability), 1 where all are alike. Shares are of the whole mini-batch, before its first gradient: an
    # update has one more forward pass
    aux_loss_coefficient: float = ranged(0.0, at_least=0)
    # of the mean squared log-sum-exp of a router's logits, in each layer
    z_loss_coefficient: float = ranged(0.0, at_least=0)
    freeze_router: bool = False  # routers stay as they are; their gradients are not computed


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    """How a model that the run trains is laid out, optimized, cut into micro-batches and recomputed."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    recompute: Recompute = Recompute.none  # activations that are not kept
    # of each layer; selective
    recompute_modules: list[RecomputeModule] = field(default_factory=lambda: [RecomputeModule.core_attn])
    # full: the first so many of each (virtual) stage; None: all
    recompute_num_layers: int | None = ranged(None, at_least=1)

    @property
    def recomputation(self) -> Recomputation:
        return Recomputation(self.recompute, tuple(self.recompute_modules), self.recompute_num_layers)


@dataclass(frozen=True, kw_only=True)
class ActorConfig(TrainedModelConfig):
    pass


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    # None: initialised from the policy's folder
    path: str | None = field(default=None, metadata=names(InputKind.data))


@dataclass(frozen=True, kw_only=True)
class CriticConfig(TrainedModelConfig):
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    model: CriticModelConfig = field(default_factory=CriticModelConfig)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen policy. It shares the actor's processes and layout."""

    path: str | None = field(default=None, metadata=names(InputKind.data))  # None: the policy's folder
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
