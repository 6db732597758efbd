"""The forward and backward passes of a micro-batch on the first rank of a pipeline stage. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import isqrt

from megarl.config.memory_sizes import logit_chunk_tokens
from megarl.config.roles import ModelRole, needs_sum_pi_squared, scores_in_update
from megarl.config.schema import (
    PPOConfig,
    Recompute,
    RecomputeModule,
    RunConfig,
)
from megarl.models.adapters import EMBEDDING_MODULE, OUTPUT_MODULE
from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size, pairs_of_block, tower_matrices
from megarl.models.layers import LayerPart, layers_of, reads_images, routes_tokens
from megarl.models.vision import Vision
from megarl.plan.step_time.counts import (
    IDLE,
    NOTHING,
    Counts,
    Edge,
    PassCounts,
    call,
    dtype_of,
    joined,
    linear,
    product,
    total,
)
from megarl.plan.step_time.layer_work import layer_work
from megarl.plan.step_time.packed_batch import PackedBatch


class StagePasses:
    """The work of a pipeline stage for a micro-batch."""

    def __init__(
        self,
        config: RunConfig,
        role: ModelRole,
        architecture: Architecture,
        stage: int,
        batch: PackedBatch,
    ) -> None:
        self._config = config
        self._role = role
        self._architecture = architecture
        self._is_first = stage == 0
        self._is_last = stage == role.parallel.pipeline_parallel_size - 1
        self._chunks = role.parallel.chunks_of_stage(architecture.num_hidden_layers, stage)
        self._batch = batch

        dtype = dtype_of(config)
        self._edge = Edge(role.parallel, self._batch.tokens, architecture.hidden_size, dtype)
        self._numbers = _layers_of_chunks(architecture, self._chunks)

        self._layers = {
            layer: layer_work(architecture, role.parallel, layer, self._batch, dtype)
            for layer in self._numbers
        }

        self._trains_tower = architecture.lora is None and not role.freeze_vision
        self._tower = (IDLE, IDLE)
        if self._is_first and reads_images(architecture):
            self._tower = tower_work(architecture, self._edge, batch, trains=self._trains_tower)

    def passes(self, num_scores: int) -> PassCounts:
        """Return the forward pass, and the backward pass with recomputation.

        Args:
            num_scores: The number of outputs per response token; 0 if the output layer is left out.
        """
        messages = PassCounts(self._messages(is_backward=False), self._messages(is_backward=True))
        return joined((*self._body(), *self._recomputed(), self._head(num_scores), messages))

    def _body(self) -> Iterator[PassCounts]:
        """Yield the work of the layers, and of what is before them on the first stage."""
        for layer, work in self._layers.items():
            of_layer = joined(work)
            number = self._numbers[layer]
            yield PassCounts(of_layer.forward.times(number), of_layer.backward.times(number))
        if self._is_first:
            # Each rank has a part of the vocabulary.
            embedded = self._edge.left()
            trains = self._architecture.trains_fully(EMBEDDING_MODULE)
            yield embedded if trains else PassCounts(embedded.forward)
            yield from self._tower

    def _head(self, num_scores: int) -> PassCounts:
        if not (self._is_last and num_scores):
            return IDLE
        drops_tokens = not routes_tokens(self._architecture)
        edge = self._edge._replace(tokens=self._batch.kept) if drops_tokens else self._edge
        return head_work(self._config, self._role, self._architecture, edge, self._batch, num_scores)

    def _recomputed(self) -> Iterator[PassCounts]:
        """Yield the forward passes that are repeated in the backward pass."""
        how, modules, num_layers = self._role.recomputation
        if how is Recompute.full:
            chunks = tuple(chunk[:num_layers] for chunk in self._chunks)
            for layer, number in _layers_of_chunks(self._architecture, chunks).items():
                again = total(part.forward for part in self._layers[layer])
                yield PassCounts(backward=again.times(number))
            # All blocks of a tower are recomputed, whatever the number of layers.
            yield PassCounts(backward=self._tower[0].forward if self._trains_tower else NOTHING)
        if how is Recompute.selective:
            for layer, number in self._numbers.items():
                again = total(_repeated(self._layers[layer], modules))
                yield PassCounts(backward=again.times(number))

    def _messages(self, *, is_backward: bool) -> Counts:
        """Return the messages of activations, or of gradients, each after a message of its shape."""
        parallel = self._role.parallel
        chunks = len(self._chunks)
        elements = self._edge.own_tokens * self._edge.width
        sent = chunks - (self._is_first if is_backward else self._is_last)
        received = chunks - (self._is_last if is_backward else self._is_first)
        return total(
            call(parallel, kind, "pipeline", size, dtype, number)
            for kind, number in (("send", sent), ("recv", received))
            for size, dtype in ((3, "int64"), (elements, self._edge.dtype))
        )


def _repeated(layer: Sequence[PassCounts], modules: Sequence[RecomputeModule]) -> Iterator[Counts]:
    _, core, feed_forward = layer
    if RecomputeModule.core_attn in modules:
        yield core.forward
    if RecomputeModule.mlp in modules:
        yield feed_forward.forward


@lru_cache(maxsize=256)
def _layers_of_chunks(
    architecture: Architecture, chunks: tuple[range, ...]
) -> Counter[tuple[LayerPart, ...]]:
    """Return how many layers are equal, by their parts."""
    return Counter(layers_of(architecture)[number] for chunk in chunks for number in chunk)


def head_work(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    edge: Edge,
    batch: PackedBatch,
    num_scores: int,
) -> PassCounts:
    """Return the work of the output layer.

    Args:
        edge: The hidden states of the last layer.
        num_scores: The number of outputs per response token of a language model.
    """
    if role.with_value_head:
        # Every rank computes the whole head, from gathered hidden states.
        gathered = edge.call("all_gather") if edge.parallel.sequence_parallel else NOTHING
        return joined(
            (PassCounts(gathered), linear(batch.scored, edge.width, 1), _scores(role, batch.responses))
        )

    return joined(
        (
            edge.entered(trains=False),
            _logits(architecture, edge, batch.scored, logit_chunk_tokens(config.engine, architecture)),
            _scores(role, num_scores * batch.responses),
        )
    )


def _scores(role: ModelRole, elements: int) -> PassCounts:
    """Return the sum of scores over the context-parallel ranks, each of which has those of its own tokens."""
    return PassCounts(call(role.parallel, "all_reduce", "context", elements, "float32"))


def _logits(architecture: Architecture, edge: Edge, tokens: int, chunk: int) -> PassCounts:
    """Return the logits and their gradients, a chunk of tokens at a time.

    The ranks exchange the maximum of each token's logits, and then four sums. The backward pass computes the
    logits again, except for those of the last chunk. A frozen output layer has no weight gradient.
    """
    shards = edge.parallel.tensor_parallel_size
    columns = min(padded_vocab_size(architecture.vocab_size, shards) // shards, architecture.vocab_size)
    whole_chunks, rest = divmod(tokens, chunk)
    sizes = {chunk: whole_chunks, rest: 1} if rest else {chunk: whole_chunks}
    last = rest or chunk
    trains = architecture.trains_fully(OUTPUT_MODULE)
    forward: list[Counts] = []
    backward: list[Counts] = []

    for size, number in sizes.items():
        if not number:
            continue
        forward += [
            product(size, edge.width, columns, number),
            call(edge.parallel, "all_reduce", "tensor", size, "float32", number),
            call(edge.parallel, "all_reduce", "tensor", 4 * size, "float32", number),
        ]
        backward += [
            product(size, edge.width, columns, number - (size == last)),
            product(size, columns, edge.width, number),
            product(columns, size, edge.width, number * trains),
        ]

    return PassCounts(total(forward), total(backward))


def tower_work(
    architecture: Architecture, edge: Edge, batch: PackedBatch, *, trains: bool
) -> tuple[PassCounts, PassCounts]:
    """Return the work of the tower's blocks, and of what is around them.

    Each prompt is taken to be one image, as large and square as fits, as in a dry run.

    Args:
        architecture: The model, which has a tower.
        edge: The hidden states of the language model.
        trains: Whether the tower is trained.
    """
    vision = architecture.sizes_of(Vision)
    sides = [isqrt(prompt) for prompt in batch.prompts]
    tokens = round(batch.share * sum(side**2 for side in sides))
    patches = tokens * vision.patches_per_token

    blocks = []
    around = []
    for outputs, inputs, per_token, in_block in tower_matrices(architecture):
        rows = tokens if per_token else patches
        work = linear(rows, inputs, outputs)
        # Pixels have no gradient, so the first matrix has only that of its weight.
        if not in_block and inputs == vision.patch_elements:
            work = PassCounts(work.forward, product(outputs, rows, inputs))
        (blocks if in_block else around).append(work)

    # Two products per pair in the forward pass, and five in the backward pass.
    pairs = batch.share * sum(
        pairs_of_block(vision, block, vision.spatial_merge_size * side, vision.spatial_merge_size * side)
        for block in range(vision.depth)
        for side in sides
    )
    flops = 2 * pairs * vision.hidden_size
    blocks.append(PassCounts(Counts((), 2 * flops, 2 * flops), Counts((), 5 * flops, 5 * flops)))

    # Tensor-parallel ranks have the gradients of their own tokens with sequence parallelism.
    if edge.parallel.sequence_parallel:
        features = edge._replace(tokens=tokens * (1 + len(vision.deepstack_blocks)))
        around.append(PassCounts(backward=features.call("all_reduce")))
    if not trains:
        return _forward_only(blocks), _forward_only(around)
    return joined(blocks), joined(around)


def _forward_only(parts: Sequence[PassCounts]) -> PassCounts:
    """Return the work of a frozen tower, which has no backward pass."""
    return PassCounts(total(part.forward for part in parts), NOTHING)


def scoring_counts(
    config: RunConfig, role: ModelRole, architecture: Architecture, stage: int, batch: PackedBatch
) -> Counts:
    """Return what it costs to score a micro-batch."""
    return StagePasses(config, role, architecture, stage, batch).passes(_num_scores(config, role)).forward


def training_counts(
    config: RunConfig, role: ModelRole, architecture: Architecture, stage: int, batch: PackedBatch
) -> Counts:
    """Return what the forward and backward pass of a micro-batch cost, with recomputation.

    A load-balancing loss of routers has another forward pass, which only counts. The arguments are those of
    `scoring_counts`.
    """
    work = StagePasses(config, role, architecture, stage, batch)
    passes = work.passes(_num_trained_scores(config, role))
    counts = [passes.forward, passes.backward]
    if routes_tokens(architecture) and role.routers.aux_loss_coefficient:
        counts.append(work.passes(0).forward)
    return total(counts)


def _num_scores(config: RunConfig, role: ModelRole) -> int:
    """Return the number of outputs per response token in scoring: log-probs, entropy, and others if asked."""
    is_actor = role.name == "actor" and isinstance(config, PPOConfig)
    return 2 + (is_actor and needs_sum_pi_squared(config.algorithm))


def _num_trained_scores(config: RunConfig, role: ModelRole) -> int:
    """Return the number of outputs per response token in training: log-probs, and entropy if it is read."""
    if not isinstance(config, PPOConfig):
        return 1
    scores = scores_in_update(config.algorithm, one_update=config.trainer.one_update)
    return 1 + bool(config.algorithm.entropy_coefficient or scores)
