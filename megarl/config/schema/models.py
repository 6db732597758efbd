"""The sections of models: the policy's folder, and each role's layout, training and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from megarl.config.kinds import OptimizerKind
from megarl.config.schema.keys import MISSING, PathKind, Reader, matters, names, numbers, only_with, ranged
from megarl.models.architecture import LoRA


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Options of Megatron-Core for a trained model, by Megatron's names; see Options of Megatron-Core.

    `base` selects one of the presets in `configs/megatron`, or a list of them, which are combined.
    """

    # fields of TransformerConfig and ModelParallelConfig
    transformer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)  # fields of DistributedDataParallelConfig
    optimizer: dict[str, Any] = field(default_factory=dict)  # fields of OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class FrozenMegatronConfig:
    """Options of Megatron-Core for a model that does not train, which needs no others than of its layers."""

    # fields of TransformerConfig; null: for the reference those of the actor, so that both compute with the
    # same numerics, for other models none
    transformer: dict[str, Any] | None = field(default_factory=dict)


class DType(str, Enum):
    # bfloat16 on CUDA; float32 on CPU, where bfloat16 is many times slower on most processors
    auto = "auto"
    float32 = "float32"  # four bytes
    bfloat16 = "bfloat16"  # two bytes; the optimizer keeps float32 master weights


class Recompute(str, Enum):
    none = "none"  # all activations are saved
    selective = "selective"  # activations inside `recompute_modules` are recomputed in the backward pass
    full = "full"  # activations of whole layers are recomputed: the least memory


class RecomputeModule(str, Enum):
    """Modules by Megatron's names.

    `layernorm` is not supported: Transformer Engine fuses it into other layers, and Megatron requires that
    package to recompute it.
    """

    core_attn = "core_attn"  # attention without its linear layers; CUDA attention kernels save little anyway
    mlp = "mlp"  # the MLP, which has most of a layer's activations


class Recomputation(NamedTuple):
    """The recomputation in the backward pass, as configured for a role."""

    how: Recompute = Recompute.none
    modules: tuple[RecomputeModule, ...] = (RecomputeModule.core_attn,)
    num_layers: int | None = None


class Decay(str, Enum):
    constant = "constant"  # the learning rate stays at `lr`
    linear = "linear"  # linear decay to `min_lr`, which is the rate of the last update
    cosine = "cosine"  # cosine decay to `min_lr`, which is the rate of the last update


@dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig:
    """How the indexers of sparse attention (DSA) are trained."""

    # weight of the loss that trains the indexers of the policy: in each layer, the mean over tokens of the
    # Kullback-Leibler divergence between the attention of all heads and the softmax of the index scores, over
    # the selected keys. It has no gradient for other weights. 0: indexers stay as loaded
    indexer_loss_coefficient: float = ranged(0.0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: a Hugging Face folder (`config.json`, safetensors, tokenizer)."""

    # path of the model folder, or a name on the Hugging Face hub
    path: str = matters(field(default=MISSING, metadata=names(PathKind.data)), "always: the model to train")
    trust_remote_code: bool = False  # run Python files from the folder; enable only for trusted authors
    dtype: DType = DType.auto  # data type of weights and activations, in trainer and engine
    sparse_attention: SparseAttentionConfig = only_with(
        field(default_factory=SparseAttentionConfig),
        Reader("model.path", architecture="indexer"),
        is_refused=True,
    )


class RankCoordinate(NamedTuple):
    """The coordinate of a rank in its role's parallel layout.

    Ranks with the same `dp` form one replica and work on the same rows.
    """

    dp: int
    tp: int = 0
    pp: int = 0
    cp: int = 0


_EXPERTS = Reader("model.path", architecture="experts")


def balanced_layout(num_layers: int, stages: int) -> list[int]:
    """Return the `pipeline_layout` whose stages differ by one layer at most.

    The last and then the first stage, which also have the output layer and the embedding, have the fewer
    layers.
    """
    each, more = divmod(num_layers, stages)
    first = (stages - more) // 2
    return [each + (first <= stage < first + more) for stage in range(stages)]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Megatron's parallel sizes of one role.

    A role has `data_parallel_size` replicas of (tensor x context x pipeline) ranks.
    """

    # ranks that shard each layer's weight matrices, all on one node
    tensor_parallel_size: int = matters(
        ranged(1, at_least=1, at_most=1024), "if the model and its optimizer do not fit; at most one node"
    )
    pipeline_parallel_size: int = ranged(1, at_least=1, at_most=1024)  # stages of consecutive layers
    # virtual stages per pipeline stage, which shrink the pipeline bubble
    virtual_pipeline_parallel_size: int | None = only_with(
        ranged(None, at_least=2),
        Reader(".pipeline_parallel_size", above=1, example="2"),
        is_refused=True,
        why="it requires a pipeline",
    )
    # numbers of layers of the stages, such as [15, 16, 16, 14]; null: all have equally many. Not with virtual
    # stages
    pipeline_layout: list[int] | None = only_with(
        None,
        Reader(".pipeline_parallel_size", above=1, example="2"),
        is_refused=True,
        why="it requires a pipeline",
    )
    # ranks that split the tokens of each sequence, for long sequences
    context_parallel_size: int = ranged(1, at_least=1, at_most=1024)
    # replicas, each with a share of the batch
    data_parallel_size: int = matters(
        ranged(1, at_least=1, at_most=10000), "devices of the actor / its other parallel sizes"
    )
    # split activations between the matrices over the tensor-parallel ranks by token, which saves memory
    sequence_parallel: bool = only_with(
        False,
        Reader(".tensor_parallel_size", above=1, example="2"),
        is_refused=True,
        why="it splits activations over tensor-parallel ranks",
    )
    # ranks of a stage over which whole experts are distributed; they may span replicas
    expert_parallel_size: int = only_with(ranged(1, at_least=1, at_most=1024), _EXPERTS, is_refused=True)
    # ranks that shard each expert's weight matrices
    expert_tensor_parallel_size: int = only_with(
        ranged(1, at_least=1, at_most=1024), _EXPERTS, is_refused=True
    )

    def __hash__(self) -> int:
        # A list has no hash.
        values = vars(self) | {"pipeline_layout": tuple(self.pipeline_layout or ())}
        return hash(tuple(values.values()))

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline_parallel_size

    @property
    def num_virtual_stages(self) -> int:
        return self.pipeline_parallel_size * (self.virtual_pipeline_parallel_size or 1)

    def virtual_stages(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each virtual stage, in the order of the layers.

        Layers are assigned round-robin: with 8 layers, 2 stages and 2 virtual stages, stage 0 has the first
        and the third virtual stage, so layers 0, 1, 4 and 5. Runs have no layers that do not divide; such
        layers would be assigned round-robin too.
        """
        counts = self.pipeline_layout
        if counts is None:
            size = max(1, num_layers // self.num_virtual_stages)
            return tuple(range(first, min(first + size, num_layers)) for first in range(0, num_layers, size))
        return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))

    def representatives(self) -> tuple[int, ...]:
        """Return for each stage the first one like it: the first, the last, or one with as many layers."""
        counts = self.pipeline_layout or [0] * self.pipeline_parallel_size
        last = self.pipeline_parallel_size - 1
        found: dict[tuple[bool, bool, int], int] = {}
        return tuple(
            found.setdefault((stage == 0, stage == last, count), stage) for stage, count in enumerate(counts)
        )

    def chunks_of_stage(self, num_layers: int, stage: int) -> tuple[range, ...]:
        """Return the layers of each virtual stage of a pipeline stage."""
        return self.virtual_stages(num_layers)[stage :: self.pipeline_parallel_size]

    @property
    def replica_size(self) -> int:
        """The number of ranks that process the same rows."""
        return self.tensor_parallel_size * self.context_parallel_size * self.pipeline_parallel_size

    @property
    def stage_size(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.tensor_parallel_size * self.num_copies

    @property
    def num_copies(self) -> int:
        """The number of ranks with the same parameters.

        They reduce their gradients and shard the optimizer state.
        """
        return self.context_parallel_size * self.data_parallel_size

    @property
    def micro_batch_multiple(self) -> int:
        """The number that the micro-batches of a pass must be a multiple of.

        Virtual stages alternate in whole rounds of micro-batches.
        """
        return 1 if self.virtual_pipeline_parallel_size is None else self.pipeline_parallel_size

    def coordinate(self, rank: int) -> RankCoordinate:
        """Return the coordinate of a rank in Megatron's order.

        Tensor ranks vary fastest, then context, data and pipeline ranks.
        """
        rest, tensor = divmod(rank, self.tensor_parallel_size)
        rest, context = divmod(rest, self.context_parallel_size)
        stage, replica = divmod(rest, self.data_parallel_size)
        return RankCoordinate(tp=tensor, cp=context, dp=replica, pp=stage)

    @property
    def expert_data_parallel_size(self) -> int:
        """The number of copies of each expert."""
        return self.stage_size // (self.expert_parallel_size * self.expert_tensor_parallel_size)


class OnNonFinite(str, Enum):
    """The policy for a loss or gradient norm that is not finite."""

    stop = "stop"  # end the run; the weights are those of the previous update
    skip = "skip"  # drop the update of the mini-batch, and count it in `<model>/skipped_updates`
    # return to the last snapshot and repeat the step once; requires `recovery.enabled`
    recover = "recover"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    kind: ClassVar[OptimizerKind] = OptimizerKind.adam
    # learning rate after the warm-up
    lr: float = matters(
        ranged(1e-6, above=0, at_most=1),
        "larger if the score does not rise, smaller if it collapses",
    )
    betas: list[float] = numbers([0.9, 0.95], at_least=0, below=1)  # Adam's beta1 and beta2
    eps: float = ranged(1e-8, above=0, at_most=1)  # Adam's epsilon
    weight_decay: float = ranged(0.01, at_least=0)  # decoupled (AdamW); not applied to norms and biases
    clip_grad: float = ranged(1.0, at_least=0)  # maximum global gradient norm; 0 disables clipping
    warmup_steps: int = ranged(0, at_least=0)  # optimizer steps of linear warm-up from 0
    decay: Decay = Decay.constant  # learning-rate schedule from the end of the warm-up to the last step
    # learning rate of the last update; with 0, that update changes nothing
    min_lr: float = only_with(ranged(0.0, at_least=0), Reader(".decay", (Decay.linear, Decay.cosine)))
    on_nonfinite: OnNonFinite = OnNonFinite.stop  # what follows a loss or gradient that is not finite


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """How a rank's rows are split into micro-batches: by a number of rows or by a token budget.

    Set exactly one of them.
    """

    sequences: int | None = ranged(None, at_least=1)  # rows of a micro-batch
    # maximum tokens of a micro-batch per rank; the main control of activation memory
    max_tokens: int | None = matters(
        ranged(None, at_least=1), "larger to use the memory that is left, smaller if the actor runs out of it"
    )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """How the routers of a mixture-of-experts model are trained.

    Most RL recipes disable the auxiliary losses, which move log-probs away from those that generated the
    samples.
    """

    # weight of the load-balancing loss. In each layer it is E * sum over experts of (share of tokens) * (mean
    # probability), which is 1 for a uniform load. The shares are those of the whole mini-batch, before its
    # first gradient, so an update has an additional forward pass
    aux_loss_coefficient: float = ranged(0.0, at_least=0)
    # weight of the mean squared log-sum-exp of the router's logits, in each layer
    z_loss_coefficient: float = ranged(0.0, at_least=0)
    freeze_router: bool = False  # do not train routers; their gradients are not computed
    # change of each expert's selection bias per update: up if the expert got fewer tokens than the average,
    # down if it got more. 0: biases stay as loaded. Only for models that have them, such as GLM-4.5
    bias_update_rate: float = ranged(0.0, at_least=0)


class LoRASync(str, Enum):
    # engines get weights with the adapters merged, in every sync: they serve the model as fast as any other
    merged = "merged"
    # engines get the frozen model once, and the adapters in every sync: far fewer bytes, but an engine
    # computes two more products for each projection
    adapter = "adapter"


def _of_adapters[Value](default: Value) -> Value:
    return only_with(default, Reader(".rank", example="32"), is_refused=True, why="all weights train")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters on a frozen model: W + alpha / rank * B A (Hu et al. 2021, arXiv 2106.09685)."""

    # rank of every adapter, such as 8 or 32; null: all weights train
    rank: int | None = ranged(None, at_least=1, at_most=4096)
    alpha: float = _of_adapters(ranged(32.0, above=0))  # adapters are scaled by alpha / rank
    # projections with an adapter, as suffixes of Hugging Face names, such as [q_proj, v_proj] or
    # [mlp.gate_proj]; empty: every projection of attention, of feed-forwards and of experts
    targets: list[str] = _of_adapters(field(default_factory=list))
    # modules that train in full next to the adapters, by PEFT's names: embed_tokens, lm_head, or both; a
    # reference that is the model without its adapters has the original ones
    modules_to_save: list[str] = _of_adapters(field(default_factory=list))
    sync: LoRASync = _of_adapters(
        LoRASync.merged
    )  # what a weight sync sends to the engines (of the actor only)
    # folder of an adapter in PEFT's format to start from; null: A is random, B is zero
    path: str | None = _of_adapters(field(default=None, metadata=names(PathKind.data)))


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    """The layout, optimizer, micro-batches and recomputation of the policy, or of another trained model."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    experts: ExpertsConfig = only_with(field(default_factory=ExpertsConfig), _EXPERTS, is_refused=True)
    # do not train the vision tower of a model that reads images
    freeze_vision: bool = only_with(False, Reader("model.path", architecture="vision"), is_refused=True)
    # the activations that are recomputed instead of saved
    recompute: Recompute = matters(Recompute.none, "`full`, if the actor runs out of memory; it is slower")
    # the modules of each layer to recompute
    recompute_modules: list[RecomputeModule] = only_with(
        field(default_factory=lambda: [RecomputeModule.core_attn]),
        Reader(".recompute", (Recompute.selective,)),
        is_refused=True,
    )
    # number of layers to recompute, from the first of each (virtual) stage; null: all
    recompute_num_layers: int | None = only_with(
        ranged(None, at_least=1), Reader(".recompute", (Recompute.full,)), is_refused=True
    )
    megatron: MegatronConfig = field(default_factory=MegatronConfig)

    @property
    def recomputation(self) -> Recomputation:
        return Recomputation(self.recompute, tuple(self.recompute_modules), self.recompute_num_layers)

    @property
    def adapters(self) -> LoRA | None:
        """The adapters that train instead of the weights, None if all weights train."""
        if self.lora.rank is None:
            return None
        return LoRA(
            rank=self.lora.rank,
            alpha=self.lora.alpha,
            targets=tuple(self.lora.targets),
            modules_to_save=tuple(sorted(self.lora.modules_to_save)),
        )

    @property
    def served_adapters(self) -> LoRA | None:
        """The adapters that engines apply, None if they get weights with the adapters merged."""
        return self.adapters if self.lora.sync is LoRASync.adapter else None


@dataclass(frozen=True, kw_only=True)
class CriticModelConfig:
    # model folder of the critic; null: initialized from the policy's folder
    path: str | None = field(default=None, metadata=names(PathKind.data))


@dataclass(frozen=True, kw_only=True)
class CriticConfig(ActorConfig):
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    model: CriticModelConfig = field(default_factory=CriticModelConfig)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen reference policy. It shares the actor's processes and layout."""

    # model folder of the reference; null: the policy's folder
    path: str | None = field(default=None, metadata=names(PathKind.data))
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    megatron: FrozenMegatronConfig = field(default_factory=lambda: FrozenMegatronConfig(transformer=None))


@dataclass(frozen=True, kw_only=True)
class PairReferenceConfig:
    """The reference of direct preference optimization. It scores all pairs before training starts."""

    # model folder of the reference, with the policy's tokenizer; null: the policy before its first step. It
    # has the policy's layout and devices, which it leaves before the policy starts
    path: str | None = field(default=None, metadata=names(PathKind.data))


def of_folder[Value](default: Value) -> Value:
    """Declare a key that needs the folder of a model."""
    return only_with(default, Reader(".path", example="FOLDER"), is_refused=True)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A frozen policy whose log-probs of the samples are the target of the estimator `distillation`."""

    # model folder of the teacher, with the policy's tokenizer; its architecture and size may be others
    path: str | None = field(default=None, metadata=names(PathKind.data))
    parallel: ParallelConfig = of_folder(field(default_factory=ParallelConfig))
    micro_batch: MicroBatchConfig = of_folder(
        field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    )
    megatron: FrozenMegatronConfig = of_folder(field(default_factory=FrozenMegatronConfig))


@dataclass(frozen=True, kw_only=True)
class SourceTeacherConfig(TeacherConfig):
    """A teacher of the samples of some data sources."""

    name: str = MISSING  # its role is `teacher_<name>`, as in placements and timings
    # values of the column `data_source` whose samples it scores; `teacher` scores all others
    data_sources: list[str] = field(default_factory=list)
