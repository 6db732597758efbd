"""Memory that a model needs at work in addition to its state: saved activations plus transient peaks. Pure.

On CUDA the estimate is a close upper bound; docs/evidence.md lists measurements. Transformer Engine's
layers save the same tensors as the local ones, and need some memory of their own (layer_sizes.py). Where
the run's machines decide between the two, the larger size counts. On a CPU, where norms consist of more
operations, the estimate is coarser.
"""

from __future__ import annotations

from itertools import chain
from math import ceil
from typing import NamedTuple

from megarl.config.batch_arithmetic import (
    fullest_micro_batch,
    fullest_with_shared_prompt,
    micro_batch_tokens,
    rounded_up,
    rows_of_replica,
)
from megarl.config.megatron_options import token_multiple
from megarl.config.memory_sizes import logit_chunk_tokens
from megarl.config.roles import ModelRole, RoleKind
from megarl.config.schema import Layers, PPOConfig, Recompute, RecomputeModule, RunConfig
from megarl.models.adapters import OUTPUT_MODULE
from megarl.models.architecture import Activation, Architecture
from megarl.models.counts import padded_vocab_size
from megarl.models.layers import kinds_of, layers_of, reads_images, replaces_core, routes_tokens
from megarl.models.mapping import FEED_FORWARD, MIXER, PartKind
from megarl.models.vision import Vision
from megarl.plan.placement.layer_sizes import (
    WORKSPACE_BYTES,
    Kernels,
    chunks_under_way,
    kernels_of,
    layer_kind,
    placeholder_elements,
    workspace_bytes,
)
from megarl.plan.placement.model_state import Usage, model_state, quantized_bytes, step_memory
from megarl.plan.placement.part_activations import ACTIVATIONS, LayerSizes, tower_bytes

_FLOAT32 = 4
_ID = 4  # of a token, in batches
# Tensors of the size of the top tokens' log-probs that exist at once: the model's, before and after padding,
# two without what is left out, and their difference, exponentials, products and gradients.
_TOP_TENSORS = 12
# Per token of a pass, all of whose micro-batches are on the device when it begins. Sharded by context
# parallelism: an id, a position and three indices, 8 bytes each.
_OWN_BATCH_BYTES = 40
# For all tokens of the rows: a mask, and five 4-byte values that are inputs or outputs of the loss.
_WHOLE_BATCH_BYTES = 24
# Logits processed at a time on a CPU.
_CPU_BLOCK = 2**17


class RoleMemory(NamedTuple):
    """The memory of one rank of a model, in bytes: its state, and what it needs at work in addition.

    Attributes:
        score: The peak while scoring.
        train: The peak while training; 0 for a frozen model.
        step: The peak of the optimizer step; 0 for a frozen model.
        stays: What remains allocated afterwards.
        scored_batch: The part of `score` that belongs to the batch, all of whose micro-batches are on the
            device.
        trained_batch: The part of `train` that belongs to the batch.
        quantized: The copies of weights in FP8, which are in memory as long as the weights.
    """

    state: Usage
    score: int
    train: int
    step: int
    stays: int
    scored_batch: int
    trained_batch: int
    quantized: int


def role_memory(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    stage: int,
    *,
    uneven: bool = True,
    shares: bool | None = None,
) -> RoleMemory:
    """Return the memory of one rank of a pipeline stage.

    Args:
        uneven: Whether one of the rank's experts receives twice its share of the tokens.
        shares: Whether two rows of the largest micro-batch share a prompt, where that is another way through
            attention (see `sharing_is_another_way`). By default, the peaks are the larger ones of both.
    """
    both = (False, True) if sharing_is_another_way(config, role, architecture) else (False,)
    trains = role.optim is not None
    reduced, stepped = step_memory(config, role, architecture, stage) if trains else (0, 0)
    works = [
        _Work(config, role, architecture, stage, uneven=uneven, shares=each)
        for each in (both if shares is None else (shares,))
    ]
    trained = [
        work.stays(trains) + max(work.train(), work.batch(trains=True) + reduced) for work in works if trains
    ]
    first = works[0]

    return RoleMemory(
        state=model_state(role, architecture, config.model.dtype, stage),
        score=max(work.stays(trains) + work.score() for work in works),
        train=max(trained, default=0),
        step=first.stays(trains) + stepped if trains else 0,
        stays=first.stays(trains),
        scored_batch=first.batch(trains=False),
        trained_batch=first.batch(trains=True) if trains else 0,
        quantized=quantized_bytes(role, architecture, stage),
    )


def sharing_is_another_way(config: RunConfig, role: ModelRole, architecture: Architecture) -> bool:
    """Return whether a micro-batch whose rows share a prompt has another peak than the largest one.

    So it is with context parallelism: where rows share a prompt, ranks gather keys and values, which they
    otherwise pass on in a ring or copy for each chunk. It is False if rows of the largest micro-batch share
    a prompt.
    """
    return (
        role.parallel.context_parallel_size > 1
        and kernels_of(config) is Kernels.flash
        and not replaces_core(architecture)
        and fullest_with_shared_prompt(config, role, architecture, trains=False) is not None
    )


class _Work:
    """The sizes of one rank, in bytes unless they are described as elements per token."""

    def __init__(
        self,
        config: RunConfig,
        role: ModelRole,
        architecture: Architecture,
        stage: int,
        *,
        uneven: bool,
        shares: bool,
    ) -> None:
        self._config = config
        self._role = role
        self._architecture = architecture
        self._parallel = parallel = role.parallel
        self._is_first = stage == 0
        self._is_last = stage == parallel.pipeline_parallel_size - 1
        self._stage = stage
        shards = parallel.tensor_parallel_size
        self._vocabulary = padded_vocab_size(architecture.vocab_size, shards) // shards  # this rank's rows

        chunks = parallel.chunks_of_stage(architecture.num_hidden_layers, stage)
        self._layers = max(map(len, chunks))

        # Activations that are recomputed in the backward pass are not saved.
        how, modules, num_layers = role.recomputation
        self._layers_again = min(num_layers or self._layers, self._layers) if how is Recompute.full else 0
        self._mlp_is_computed_again = how is Recompute.selective and RecomputeModule.mlp in modules

        self._fullest = {
            trains: (shares and fullest_with_shared_prompt(config, role, architecture, trains=trains))
            or fullest_micro_batch(config, role, architecture, trains=trains)
            for trains in (False, True)
        }
        self._sizes = sizes = LayerSizes(config, role, architecture, self._fullest[False], uneven=uneven)
        self._element = sizes.element
        self.kernels = sizes.kernels
        kinds = [kind for kind in kinds_of(architecture) if kind in ACTIVATIONS]
        self._parts = {kind: ACTIVATIONS[kind](sizes) for kind in kinds}

        # The kinds of the parts of each layer, by virtual stages.
        layers = layers_of(architecture)
        self._kinds = [[tuple(part.kind for part in layers[number]) for number in chunk] for chunk in chunks]
        self._routes_tokens = routes_tokens(architecture)

    @property
    def _top_k(self) -> int:
        """The tokens at each position that a teacher returns and the policy's loss reads; else 0."""
        if not isinstance(self._config, PPOConfig):
            return 0
        if self._role.kind not in (RoleKind.teacher, RoleKind.actor):
            return 0
        return self._config.algorithm.teacher_top_k or 0

    def _top_of_batch(self, trains: bool) -> int:
        """Return the bytes per token of the top tokens of all rows: outputs of a teacher, or the loss's."""
        if not self._top_k or not (trains or self._role.kind is RoleKind.teacher):
            return 0
        own = self._sizes.context if trains else 1
        return _ID * self._top_k // own + _FLOAT32 * (self._top_k + 1)

    def _top_of_micro_batch(self, tokens: int) -> int:
        """Return the bytes of the log-probs of top tokens, and of what the loss computes from them."""
        return _TOP_TENSORS * tokens * self._sizes.context * (self._top_k + 1) * _FLOAT32 * (self._top_k > 0)

    @property
    def _chunk_tokens(self) -> int:
        return logit_chunk_tokens(self._config.engine, self._architecture)

    def _tokens(self, trains: bool) -> int:
        rows = self._fullest[trains]
        # Without packing, every row is padded to the longest row of the micro-batch.
        if self._config.engine.packing:
            tokens = micro_batch_tokens(rows, self._sizes.context) // self._sizes.context
        else:
            tokens = len(rows) * max(row.tokens for row in rows)

        return rounded_up(tokens, self._parallel.tensor_parallel_size * token_multiple(self._role.megatron))

    def batch(self, trains: bool) -> int:
        """Return the bytes of all rows of a pass at their maximum length."""
        rows = rows_of_replica(self._config, self._role, trains=trains)
        of_token = _OWN_BATCH_BYTES // self._sizes.context + _WHOLE_BATCH_BYTES + self._top_of_batch(trains)
        return rows * self._sizes.longest * of_token

    def stays(self, trains: bool) -> int:
        """Return the bytes that remain allocated between passes.

        These are what the layers keep, what each (virtual) stage received last (a micro-batch, and the
        gradient that it sent back), and the RoPE angles of the longest row. MoE models also keep how often
        each token counts, and the statistics of routers that train.
        """
        # Buffers outlive a pass, so the maximum of scoring and training counts.
        tokens = max(self._tokens(trains), self._tokens(trains=False))
        chunks = self._parallel.virtual_pipeline_parallel_size or 1
        # The first stage receives nothing from another rank, but its later virtual stages do.
        received = self._sizes.part * (1 + trains) * (chunks - self._is_first)
        angles = chunks * self._sizes.longest * self._architecture.rotary_dim * _FLOAT32
        counted = (
            8 * tokens
            + 2 * 8 * self._architecture.num_hidden_layers * self._architecture.num_experts * trains
        )

        return (
            self._layers_keep(tokens, trains)
            + tokens * received * self._element
            + angles
            + counted * self._routes_tokens
        )

    def _layers_keep(self, tokens: int, trains: bool) -> int:
        """Return the bytes that layers keep.

        Local layers have Megatron's buffer for tokens gathered by sequence parallelism (if weights train);
        those of Transformer Engine have workspaces and placeholders of weight gradients. Routers use its
        product if it is installed, also with local layers.
        """
        local = tokens * self._sizes.whole * self._parallel.sequence_parallel * trains * self._element
        if self._routes_tokens and self.kernels is not Kernels.cpu:
            local += WORKSPACE_BYTES
        fused = workspace_bytes(self._architecture) + trains * self._element * placeholder_elements(
            self._architecture, self._parallel
        )
        kind = layer_kind(self._config)

        return {Layers.local: local, Layers.transformer_engine: fused, Layers.auto: max(local, fused)}[kind]

    def _tower(self, trains: bool) -> int:
        """Return the bytes of the vision tower, which runs before the layers."""
        if not (self._is_first and reads_images(self._architecture)):
            return 0
        tower = self._architecture.sizes_of(Vision)
        return tower_bytes(self._role, tower, self._fullest[trains], self._element, trains=trains)

    def score(self) -> int:
        tokens = self._tokens(trains=False)
        sizes = self._sizes

        # On a CPU, everything that a layer would save for backward counts as live at once.
        if self.kernels is Kernels.cpu:
            top = 6 * sizes.whole if self._is_last else 2 * sizes.whole
            layer = tokens * (self._kept_of_largest_layer + top)
        else:
            # Hidden states of a layer, starting with its input, plus the maximum of: gate, up, activation and
            # their product; the product and its output; for frozen weights, the gathered input; or the
            # embedding's output before and after transposition.
            inside = max(
                4 * sizes.gate,
                sizes.whole
                + (2 if self._parallel.sequence_parallel and self._role.optim is None else 1) * sizes.gate,
                2 * sizes.whole * self._is_first,
                2 * sizes.query + 2 * sizes.squares,
                *(part.scoring for part in self._parts.values()),
            )
            layer = tokens * max(6 * sizes.part + inside, self._products_of_shared)

        head = 0
        # A critic's head returns one value per token, so it has no logits.
        if self._is_last:
            head = tokens * 2 * sizes.whole * self._element + (
                0 if self._role.with_value_head else self._scores(tokens)
            )
            if self._role.kind is RoleKind.teacher:
                head += self._top_of_micro_batch(tokens)

        # The peak is either inside a layer or in the head.
        moments = [layer * self._element, tokens * sizes.part * self._element + head]
        # The tower has finished when the layers begin.
        return self._most([*moments, self._tower(trains=False)]) + self.batch(trains=False)

    @property
    def _products_of_shared(self) -> int:
        """Elements per token in a layer with shared prompts whose attention is explicit matrix products.

        Responses have their prompts' keys in addition to their own. Counts queries, keys and values as
        computed, RoPE-rotated, gathered per query head, scaled and laid out.
        """
        if not (self._sizes.shares_prompts and self.kernels is Kernels.plain):
            return 0
        sizes = self._sizes
        gathered = self._sizes.keys_of_token * (2 * sizes.key + 4 * sizes.query)

        return 3 * sizes.part + 4 * sizes.query + 3 * sizes.key + ceil(gathered) + 2 * sizes.squares

    def _scores(self, tokens: int) -> int:
        """Return the bytes of a chunk's logits, of logits minus their maximum, and of the exponentials."""
        return (self._chunk(tokens) + 2 * self._block(tokens)) * _FLOAT32

    def _block(self, tokens: int) -> int:
        """Return the number of logits of a chunk that are processed at a time."""
        return (
            min(self._chunk(tokens), max(_CPU_BLOCK, self._vocabulary))
            if self.kernels is Kernels.cpu
            else self._chunk(tokens)
        )

    def _chunk(self, tokens: int) -> int:
        """Return the number of logits in a chunk."""
        return min(tokens, self._chunk_tokens) * self._vocabulary

    def train(self) -> int:
        tokens = self._tokens(trains=True)
        kept = tokens * self._kept() * self._element
        # The peak of the backward pass is in the last layer, in the head, or in the embedding.
        moments = [self._backward_of_layer(tokens)]
        if self._is_last:
            moments.append(self._backward_of_head(tokens))
        if self._is_first and self.kernels is not Kernels.cpu:
            moments.append((2 * tokens + self._vocabulary) * self._sizes.whole * self._element)

        # What a trained tower saves stays until the end of the backward pass.
        tower = self._tower(trains=True)
        if self._role.freeze_vision:
            return kept + self._most([*moments, tower]) + self.batch(trains=True)
        return kept + self._most(moments) + tower + self.batch(trains=True)

    def _most(self, moments: list[int]) -> int:
        """Combine alternative peaks. On a CPU they are added, since its allocator frees memory later."""
        return sum(moments) if self.kernels is Kernels.cpu else max(moments)

    @property
    def _kept_of_largest_layer(self) -> int:
        """Elements per token of the saved activations of the stage's layer that saves most."""
        return max(map(self._kept_of_layer, set(chain.from_iterable(self._kinds))))

    def _kept_of_layer(self, kinds: tuple[PartKind, ...]) -> int:
        """Return the elements per token of the saved activations of a layer with parts of these kinds."""
        mixers = [kind for kind in kinds if kind.prefix == MIXER]
        feed_forwards = self._kept_of_feed_forward * (len(kinds) - len(mixers))
        # Each part has a norm.
        norms = self._kept_of_norms * len(kinds) // 2
        return norms + sum(self._parts[kind].kept for kind in mixers) + feed_forwards

    @property
    def _kept_of_norms(self) -> int:
        """Inputs and outputs of both norms. On a CPU: float32 inputs, outputs before and after scaling.

        If the outputs of blocks are normalized instead of their inputs, the inputs of norms and of blocks are
        saved, which are as many. If both are, the inputs of two further norms are saved.
        """
        norms = self._architecture.norms
        further = norms.before and norms.after
        if self.kernels is Kernels.cpu:
            return (6 + 3 * further) * self._sizes.part + 2 * self._sizes.whole
        return (4 + 2 * further) * self._sizes.part

    @property
    def _kept_of_feed_forward(self) -> int:
        """Elements per token that the feed-forward that saves most does."""
        kept = (part.kept for kind, part in self._parts.items() if kind.prefix == FEED_FORWARD)
        return max(kept, default=0)

    @property
    def _saved_by_mlp(self) -> int:
        """Elements per token that recomputing the MLP saves.

        In Transformer Engine's dense MLPs, the norm before it is a part of the first product.
        """
        return self._kept_of_feed_forward + self._sizes.part * (
            self._sizes.is_fused and not self._routes_tokens
        )

    def _kept(self) -> int:
        """Return the elements per token of all saved activations.

        Counts all layers of all micro-batches in flight. Recomputed layers save only their input. The output,
        which the last norm or the next stage reads, is included.
        """
        mlp_again = self._saved_by_mlp * self._mlp_is_computed_again
        # Megatron recomputes the first layers of a virtual stage. Of several, the fullest one counts.
        chunk = self._layers_again * self._sizes.part + max(
            sum(
                self._kept_of_layer(kinds) - mlp_again * any(kind.prefix == FEED_FORWARD for kind in kinds)
                for kinds in layers[self._layers_again :]
            )
            for layers in self._kinds
        )

        if self.kernels is Kernels.cpu:
            chunk += 6 * self._sizes.whole if self._is_last else 2 * self._sizes.whole
        else:
            chunk += self._sizes.part

        return chunk * chunks_under_way(self._parallel, self._stage)

    def _backward_of_layer(self, tokens: int) -> int:
        """Return the transient bytes in backward of the last layer, when all other layers are still saved."""
        sizes = self._sizes
        # A recomputed layer has its activations again while its gradients are computed.
        all_again = self._layers_again == self._layers
        again = self._saved_by_mlp if self._mlp_is_computed_again else 0
        if all_again:
            again = self._kept_of_largest_layer
        if all_again or again:
            again += sizes.part  # its output

        with_pairs = [part.backward for kind, part in self._parts.items() if kind.of_pair]
        without_pairs = [part.backward for kind, part in self._parts.items() if not kind.of_pair]

        # Gradients of the output, and as received from the next stage.
        gradients = (1 + (not self._is_last)) * sizes.part

        if self.kernels is Kernels.cpu:
            return (
                tokens
                * (again + gradients + max(3 * sizes.gate, *without_pairs) + 2 * sizes.whole)
                * self._element
            )

        # Elements of the two matrices of the MLP.
        first = (1 + self._architecture.activation.has_gate) * sizes.gate * sizes.whole
        second = sizes.gate * sizes.whole

        # What the MLP of a layer has saved is freed before its attention.
        freed = 0 if self._architecture.layers_without_mixer else 3 * sizes.gate

        # The maximum of: in the activation, the gradients of the product (in place), of gate and up, and two
        # temporaries, or five of GELU; in the second matrix, its full output gradient, its input gradient and
        # its weight gradient; the same in the first matrix; in attention by matrix products, its gradients.
        inside = max(
            tokens * (7 if self._architecture.activation is Activation.gelu_tanh else 4) * sizes.gate,
            tokens * (sizes.whole + sizes.gate) + second,
            tokens * (sizes.whole + sizes.part - sizes.gate) + first,
            tokens * (3 * sizes.squares + 2 * sizes.query - freed),
            *(tokens * (backward - freed) for backward in with_pairs),
            *(tokens * backward for backward in without_pairs),
        )

        return (tokens * (again + gradients) + inside + self._gradient_of_tied) * self._element

    @property
    def _gradient_of_tied(self) -> int:
        """Elements of the head's gradient, which a tied embedding holds until its own is complete."""
        is_tied = self._architecture.tie_word_embeddings and not self._role.with_value_head
        return is_tied * self._is_first * self._is_last * self._vocabulary * self._sizes.whole

    def _backward_of_head(self, tokens: int) -> int:
        """Return the transient bytes in backward of the head.

        Counts the scored hidden states and their gradient; for a critic, also the full gradient of all hidden
        states. A language model adds a chunk's logits, those saved by the last chunk, the preceding gradient,
        and the maximum of the chunk's output-layer gradient and the probabilities for the next gradient.
        """
        hidden = tokens * self._sizes.whole * self._element
        if self._role.with_value_head:
            return 3 * hidden
        rows = self._vocabulary * self._sizes.whole * self._architecture.trains_fully(OUTPUT_MODULE)
        chunk = self._chunk(tokens)
        logits = 1 + (tokens > self._chunk_tokens)
        inside = chunk * logits * _FLOAT32 + max(rows * self._element, self._block(tokens) * _FLOAT32)
        inside += self._top_of_micro_batch(tokens)
        if tokens > self._chunk_tokens and self.kernels is not Kernels.cpu:
            inside += self._gradient_of_tied * self._element
        return 2 * hidden + tokens * self._sizes.part * self._element + chunk * self._element + inside
