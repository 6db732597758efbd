"""Count what a rank of a model role does for a micro-batch and for an update. Pure.

The counts are those of a dry run (megarl/rehearsal), on the first rank of a pipeline stage and with
Transformer Engine's layers. `tests/soak/test_step_counts.py` compares them for every run in configs/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from megarl.config.batch_arithmetic import Row
from megarl.config.roles import ModelRole, needs_sum_pi_squared, scores_in_update
from megarl.config.schema import (
    DType,
    ParallelConfig,
    PPOConfig,
    Recomputation,
    Recompute,
    RecomputeModule,
    RunConfig,
)
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.placement.expert_activations import layers_of_stage
from megarl.step_time.collectives import call
from megarl.step_time.counts import Counts, total
from megarl.step_time.head_work import embedding_work, head_work
from megarl.step_time.layer_work import LayerTraits, LayerWork, kind_of, layer_work
from megarl.step_time.packed_batch import pack
from megarl.step_time.update_work import reduction_counts, router_counts, step_counts
from megarl.step_time.work import Edge, PassCounts


def scoring_counts(
    config: RunConfig, role: ModelRole, architecture: Architecture, stage: int, rows: Sequence[Row]
) -> Counts:
    """Return what the forward pass of a micro-batch costs that is scored.

    Args:
        config: The run.
        role: The role of the model.
        architecture: The model.
        stage: The pipeline stage.
        rows: The rows of the micro-batch.
    """
    stage_work = _StageWork(config, role, architecture, stage, rows)
    outputs = 2
    if isinstance(config, PPOConfig) and needs_sum_pi_squared(config.algorithm) and role.name == "actor":
        outputs = 3
    parts = [work.forward.times(number) for work, number in stage_work.parts(outputs)]
    return total([*parts, stage_work.messages()])


def training_counts(
    config: RunConfig, role: ModelRole, architecture: Architecture, stage: int, rows: Sequence[Row]
) -> Counts:
    """Return what the forward and backward pass of a micro-batch cost, with its recomputation.

    The arguments are those of `scoring_counts`.
    """
    stage_work = _StageWork(config, role, architecture, stage, rows)
    parts = []
    for work, number in stage_work.parts(_outputs_of_loss(config)):
        parts += [work.forward.times(number), work.backward.times(number)]
    parts += stage_work.recomputed(role.recomputation)
    return total([*parts, stage_work.messages(), stage_work.messages(backward=True)])


def gradient_counts(config: RunConfig, role: ModelRole, architecture: Architecture, stage: int) -> Counts:
    """Return what a mini-batch costs besides its passes: sums of gradients and of router statistics."""
    chunks = chunks_of_stage(architecture, role.parallel, stage)
    reduced = reduction_counts(architecture, role.parallel, _head(role), chunks, stage)
    return total((reduced, router_counts(architecture, role)))


def optimizer_counts(config: RunConfig, role: ModelRole, architecture: Architecture, stage: int) -> Counts:
    """Return what an optimizer step costs, with the gathering of the updated parameters."""
    chunks = chunks_of_stage(architecture, role.parallel, stage)
    return step_counts(architecture, role.parallel, _head(role), chunks, stage, _dtype(config))


def update_counts(config: RunConfig, role: ModelRole, architecture: Architecture, stage: int) -> Counts:
    """Return what an update costs besides its micro-batches: reduction of gradients and optimizer step."""
    return total(
        (
            gradient_counts(config, role, architecture, stage),
            optimizer_counts(config, role, architecture, stage),
        )
    )


def _head(role: ModelRole) -> Head:
    return "value" if role.with_value_head else "lm"


def _dtype(config: RunConfig) -> str:
    """Return the dtype of weights and activations; `auto` counts as a GPU's."""
    return "float32" if config.model.dtype is DType.float32 else "bfloat16"


def _outputs_of_loss(config: RunConfig) -> int:
    """Return the number of scores per token in training: log-probs, and entropy if the loss reads it."""
    if not isinstance(config, PPOConfig):
        return 1
    algorithm = config.algorithm
    scores = scores_in_update(algorithm, one_update=config.trainer.one_update)
    return 1 + bool(algorithm.entropy_coefficient or scores)


@lru_cache(maxsize=256)
def chunks_of_stage(architecture: Architecture, parallel: ParallelConfig, stage: int) -> tuple[range, ...]:
    """Return the layers of each virtual stage of a pipeline stage."""
    layers = layers_of_stage(architecture, parallel, stage)
    number = parallel.virtual_pipeline_parallel_size or 1
    size = len(layers) // number
    return tuple(range(layers[start], layers[start] + size) for start in range(0, len(layers), size or 1))


class _StageWork:
    """The work of a pipeline stage for a micro-batch."""

    def __init__(
        self,
        config: RunConfig,
        role: ModelRole,
        architecture: Architecture,
        stage: int,
        rows: Sequence[Row],
    ) -> None:
        self._config = config
        self._role = role
        self._architecture = architecture
        self._chunks = chunks_of_stage(architecture, role.parallel, stage)
        self._is_first = stage == 0
        self._is_last = stage == role.parallel.pipeline_parallel_size - 1
        self._batch = pack(config, role, rows)
        self._edge = Edge(role.parallel, self._batch.tokens, architecture.hidden_size, _dtype(config))
        self._kinds = _kinds_of(architecture, self._chunks)
        self._layers = {
            kind: layer_work(architecture, role, kind, self._batch, _dtype(config)) for kind in self._kinds
        }

    def parts(self, num_scores: int) -> list[tuple[PassCounts, int]]:
        """Return the parts of the stage, and how often each occurs."""
        found = [(part, self._kinds[kind]) for kind, layer in self._layers.items() for part in layer]
        if self._is_first:
            found.append((embedding_work(self._edge), 1))
        if self._is_last:
            dense = not self._architecture.sparse_layers
            edge = self._edge._replace(tokens=self._batch.kept) if dense else self._edge
            head = head_work(self._config, self._role, self._architecture, edge, self._batch, num_scores)
            found.append((head, 1))

        return found

    def recomputed(self, recomputation: Recomputation) -> list[Counts]:
        """Return the forward passes that are repeated in the backward pass."""
        how, modules, num_layers = recomputation
        if how is Recompute.full:
            chunks = tuple(chunk[:num_layers] for chunk in self._chunks)
            return [
                total(part.forward for part in self._layers[kind]).times(number)
                for kind, number in _kinds_of(self._architecture, chunks).items()
            ]
        if how is Recompute.selective:
            return [
                total(_repeated(self._layers[kind], modules)).times(number)
                for kind, number in self._kinds.items()
            ]
        return []

    def messages(self, *, backward: bool = False) -> Counts:
        """Return the messages of activations, or of gradients, each after a message of its shape."""
        chunks = len(self._chunks)
        shards = self._role.parallel.tensor_parallel_size if self._role.parallel.sequence_parallel else 1
        elements = self._batch.tokens // shards * self._edge.width
        sent = chunks - (self._is_first if backward else self._is_last)
        received = chunks - (self._is_last if backward else self._is_first)
        return total(
            call(self._role.parallel, kind, "pipeline", size, dtype, number)
            for kind, number in (("send", sent), ("recv", received))
            for size, dtype in ((3, "int64"), (elements, self._edge.dtype))
        )


def _repeated(layer: LayerWork, modules: Sequence[RecomputeModule]) -> list[Counts]:
    repeated = []
    if RecomputeModule.core_attn in modules:
        repeated.append(layer.core.forward)
    if RecomputeModule.mlp in modules:
        repeated.append(layer.feed_forward.forward)
    return repeated


@lru_cache(maxsize=256)
def _kinds_of(architecture: Architecture, chunks: tuple[range, ...]) -> Counter[LayerTraits]:
    return Counter(kind_of(architecture, layer) for chunk in chunks for layer in chunk)
