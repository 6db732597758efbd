"""Memory that a model needs while it works, beside its state: counted by what is kept for the way back, and
by what is beside that at the moments that need the most. Pure.

On CUDA it is counted from above and near: docs/memory.md has what rehearsals measured. Transformer Engine's
layers, which no rehearsal can run, keep the same tensors as the local ones, and perhaps the values of
attention once more, which is in the count. On a CPU, where norms are made of more operations, the count is
coarser.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from megarl.config.batch_arithmetic import (
    Row,
    fullest_micro_batch,
    micro_batch_tokens,
    rows_of_prompt,
    rows_of_replica,
)
from megarl.config.memory_sizes import logit_chunk_tokens
from megarl.config.roles import ModelRole
from megarl.config.schema import DType, Recompute, RecomputeModule, RunConfig
from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size
from megarl.placement.activation_widths import Kernels, chunks_under_way, kernels_of, widths_of
from megarl.placement.expert_activations import sparse_layer

_FLOAT32 = 4
# Of each token of a pass, all of whose micro-batches are on the device when it begins: id, position and three
# places of 8 bytes, which are of the rank's own; a mask, and five numbers of 4 bytes that the loss reads or
# that come out, of all tokens of the rows.
_OWN_BATCH_BYTES = 40
_WHOLE_BATCH_BYTES = 24
# Logits that the engine works on at a time on a CPU.
_CPU_BLOCK = 2**17


class WorkingMemory(NamedTuple):
    """Bytes beside the state: at most while it scores, trains (0 where it is frozen) and steps, and what
    stays when that is over. scored_batch, trained_batch: of the first two, what is the batch's, all of whose
    micro-batches are there."""

    score: int
    train: int
    step: int
    stays: int
    scored_batch: int
    trained_batch: int


def working_memory(
    config: RunConfig,
    role: ModelRole,
    architecture: Architecture,
    stage: int,
    moments: int,
    *,
    uneven: bool = True,
) -> WorkingMemory:
    """Of a rank of a pipeline stage. moments: bytes of the second moments that an optimizer of the rank has.
    uneven: one of its experts has twice its share of the tokens."""
    work = _Work(config, role, architecture, stage, uneven)
    trains = role.optim is not None
    stays = work.stays(trains)

    # On CUDA Adam takes the square roots of all its second moments at a time.
    roots = 0 if work.kernels is Kernels.cpu else moments
    return WorkingMemory(
        score=stays + work.score(),
        train=stays + work.train() if trains else 0,
        step=stays + roots if trains else 0,
        stays=stays,
        scored_batch=work.batch(trains=False),
        trained_batch=work.batch(trains=True) if trains else 0,
    )


class _Work:
    """Of one rank. Sizes are in bytes but where they are said to be elements of a token."""

    def __init__(
        self, config: RunConfig, role: ModelRole, architecture: Architecture, stage: int, uneven: bool
    ) -> None:
        self._config = config
        self._role = role
        self._architecture = architecture
        self._parallel = parallel = role.parallel
        self._element = 4 if config.model.dtype is DType.float32 else 2
        self.kernels = kernels_of(config)
        self._is_first = stage == 0
        self._is_last = stage == parallel.pipeline_parallel_size - 1
        self._stage = stage
        cut = parallel.tensor_parallel_size
        self._vocabulary = padded_vocab_size(architecture.vocab_size, cut) // cut  # this rank's rows
        self._layers = architecture.num_hidden_layers // (
            parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1)
        )
        # What is computed again in the backward pass need not be kept.
        how, modules, num_layers = role.recomputation
        self._layers_again = min(num_layers or self._layers, self._layers) if how is Recompute.full else 0
        self._modules_again = modules if how is Recompute.selective else ()
        self._longest = max(row.tokens for row in self._rows(trains=False))
        self._shares_prompts = rows_of_prompt(config, role) > 1
        rows = self._rows(trains=False)
        self._context = parallel.context_parallel_size
        self._keys_of_token = self._gathered_keys(rows)
        self._widths = widths_of(
            architecture, parallel, self._longest if self.kernels is Kernels.plain else 0
        )
        self._sparse = sparse_layer(architecture, parallel, self._element, uneven=uneven)

    def _gathered_keys(self, rows: list[Row]) -> float:
        """Keys for each of the rank's tokens that are gathered for attention: where it is a product of
        matrices every response has its prompt's beside its own, and the prompt has them too; of rows that
        ranks share each rank has two chunks of every sequence, with all keys before these, and of a response
        all of its prompt as well."""
        tokens = micro_batch_tokens(rows, self._context)
        prompts = sum(row.prompt for row in rows) * self._shares_prompts
        if self._context > 1:
            return (tokens * (2 * self._context + 1) / 2 + 2 * prompts * self._context) / tokens

        return (tokens + prompts) / tokens

    @property
    def _chunk_tokens(self) -> int:
        return logit_chunk_tokens(self._config.engine, self._architecture)

    def _rows(self, trains: bool) -> list[Row]:
        return fullest_micro_batch(self._config, self._role, self._architecture, trains=trains)

    def _tokens(self, trains: bool) -> int:
        rows = self._rows(trains)
        # Without packing, every row is padded to the longest one of the micro-batch.
        if self._config.engine.packing:
            tokens = micro_batch_tokens(rows, self._context) // self._context
        else:
            tokens = len(rows) * max(row.tokens for row in rows)

        cut = self._parallel.tensor_parallel_size
        return -(-tokens // cut) * cut

    def batch(self, trains: bool) -> int:
        """Of all rows of a pass at their longest."""
        rows = rows_of_replica(self._config, self._role, trains=trains)
        longest = max(row.tokens for row in self._rows(trains))
        return rows * longest * (_OWN_BATCH_BYTES // self._context + _WHOLE_BATCH_BYTES)

    def stays(self, trains: bool) -> int:
        """Megatron's buffer for tokens that sequence parallelism gathers where weights train, what a
        (virtual) stage received last: a micro-batch, and the gradient that it gave back; its angles of the
        longest row; and of models with experts how often each token counts, and what routers that train
        counted."""
        # Buffers outlive a pass, so the larger of scoring and training counts.
        tokens = max(self._tokens(trains), self._tokens(trains=False))
        gathered = self._widths.whole * self._parallel.sequence_parallel * trains
        chunks = self._parallel.virtual_pipeline_parallel_size or 1
        # The first stage receives nothing from another rank, but its later virtual stages do.
        received = self._widths.part * (1 + trains) * (chunks - self._is_first)
        angles = chunks * self._longest * self._architecture.head_dim * _FLOAT32
        counted = (
            8 * tokens
            + 2 * 8 * self._architecture.num_hidden_layers * self._architecture.num_experts * trains
        )

        return (
            tokens * (gathered + received) * self._element
            + angles
            + counted * (self._architecture.experts is not None)
        )

    def score(self) -> int:
        tokens = self._tokens(trains=False)
        width = self._widths

        # For a CPU, all that a layer would keep for a backward pass counts as live at once.
        if self.kernels is Kernels.cpu:
            top = 6 * width.whole if self._is_last else 2 * width.whole
            layer = tokens * (self._kept_of_layer + top)
        else:
            # Hidden states of a layer, from its input on; beside them gate and up, the activation and their
            # product, or the last and what comes of it, or where weights are frozen what was gathered for
            # them; or the embedding's output as it is and turned.
            inside = max(
                4 * width.gate,
                width.whole
                + (2 if self._parallel.sequence_parallel and self._role.optim is None else 1) * width.gate,
                2 * width.whole * self._is_first,
                2 * width.query + 2 * width.squares,
                self._attention_apart,
                self._sparse.scoring,
            )
            layer = tokens * max(6 * width.part + inside, self._products_of_shared)

        head = 0
        # A critic's head gives one value per token, so it has no logits.
        if self._is_last:
            head = tokens * 2 * width.whole * self._element + (
                0 if self._role.with_value_head else self._scores(tokens)
            )

        # The two moments that may need the most: inside a layer, and in the head.
        moments = [layer * self._element, tokens * width.part * self._element + head]
        return self._most(moments) + self.batch(trains=False)

    @property
    def _attention_apart(self) -> int:
        """Elements of a token in the attention of rows that ranks share: queries and what they attended, and
        the keys and values of all as they come, and as pieces see them. In that of responses apart from their
        prompts: queries, what they attended there and the two together, weighed in float32."""
        width = self._widths
        if self._context > 1:
            return 2 * width.query + ceil(2 * width.key * (1 + self._context + self._keys_of_token))
        return (9 * width.query + 2 * width.key) * self._shares_prompts

    @property
    def _products_of_shared(self) -> int:
        """Elements of a token in a layer whose attention is a product of matrices, where responses have their
        prompts' keys beside their
        own: queries, keys and values as they came, turned, gathered, for each head of queries, scaled and
        laid out."""
        if not (self._shares_prompts and self.kernels is Kernels.plain):
            return 0
        width = self._widths
        keys = self._keys_of_token
        gathered = keys * (2 * width.key + 4 * width.query)

        return 3 * width.part + 4 * width.query + 3 * width.key + ceil(gathered) + 2 * width.squares

    def _scores(self, tokens: int) -> int:
        """A chunk's logits, what they are above the greatest, and the exponentials of that."""
        return (self._chunk(tokens) + 2 * self._block(tokens)) * _FLOAT32

    def _block(self, tokens: int) -> int:
        """Of the logits of a chunk, those that are worked on at a time."""
        return (
            min(self._chunk(tokens), max(_CPU_BLOCK, self._vocabulary))
            if self.kernels is Kernels.cpu
            else self._chunk(tokens)
        )

    def _chunk(self, tokens: int) -> int:
        """Logits."""
        return min(tokens, self._chunk_tokens) * self._vocabulary

    def train(self) -> int:
        tokens = self._tokens(trains=True)
        kept = tokens * self._kept() * self._element
        # The backward pass may need the most in the last layer, in the head or in the embedding.
        moments = [self._way_back_of_layer(tokens)]
        if self._is_last:
            moments.append(self._way_back_of_head(tokens))
        if self._is_first and self.kernels is not Kernels.cpu:
            moments.append(self._way_back_of_embedding(tokens))

        return kept + self._most(moments) + self.batch(trains=True)

    def _most(self, moments: list[int]) -> int:
        """On a CPU their sum, from above: its allocator gives back later."""
        return sum(moments) if self.kernels is Kernels.cpu else max(moments)

    @property
    def _kept_of_layer(self) -> int:
        """Elements of a token: what the way back of a layer needs."""
        return self._kept_of_norms + self._kept_of_attention + self._kept_of_mlp

    @property
    def _kept_of_norms(self) -> int:
        """Inputs and outputs of both. On a CPU inputs are in float32, and outputs before and after they are
        scaled."""
        if self.kernels is Kernels.cpu:
            return 6 * self._widths.part + 2 * self._widths.whole
        return 4 * self._widths.part

    @property
    def _kept_of_attention(self) -> int:
        width = self._widths
        has_norm = self._architecture.qk_norm
        again = RecomputeModule.core_attn in self._modules_again
        if self.kernels is Kernels.cpu:
            return 4 * width.query + 3 * width.key + 3 * (width.query + width.key) * has_norm

        if self.kernels is Kernels.plain and not again:
            # Queries, and for each of them its keys and values, laid out for the products; their weights;
            # what is attended.
            return (
                ceil((2 + 2 * self._keys_of_token) * width.query)
                + width.squares
                + (width.query + 2 * width.key) * has_norm
            )

        # The product of all three; queries and keys turned by their angles; values; what is attended, which
        # without packing is laid out once more, and a float32 number of each head.
        head_numbers = 2 * width.query // self._architecture.head_dim
        normalised = width.query * has_norm  # which several groups of heads on a rank lay out again

        # in the place of the rank's own keys and values those that its queries see
        if self._context > 1 and not again:
            return 2 * width.query + ceil(2 * self._keys_of_token * width.key) + head_numbers + normalised
        return (
            3 * width.query
            + 4 * width.key
            + head_numbers
            + normalised
            + width.query * (not self._config.engine.packing)
        )

    @property
    def _kept_of_mlp(self) -> int:
        """Gate and up, and their product, and on a CPU the activated gate; or what experts keep."""
        return max((3 + (self.kernels is Kernels.cpu)) * self._widths.gate, self._sparse.kept)

    @property
    def _mlp_is_computed_again(self) -> bool:
        return RecomputeModule.mlp in self._modules_again

    def _kept(self) -> int:
        """Elements of a token: of all layers of all micro-batches that are under way, of those computed again
        only their input; and their output, which the last norm or the next stage reads."""
        layer = self._kept_of_layer - self._kept_of_mlp * self._mlp_is_computed_again
        chunk = self._layers_again * self._widths.part + (self._layers - self._layers_again) * layer

        if self.kernels is Kernels.cpu:
            chunk += 6 * self._widths.whole if self._is_last else 2 * self._widths.whole
        else:
            chunk += self._widths.part

        return chunk * chunks_under_way(self._parallel, self._stage)

    def _way_back_of_layer(self, tokens: int) -> int:
        """Of the last layer, when all others are still kept."""
        width = self._widths
        # A layer that is computed again has its activations back while its gradients are made.
        all_again = self._layers_again == self._layers
        again = self._kept_of_layer if all_again else self._kept_of_mlp if self._mlp_is_computed_again else 0
        if all_again or again:
            again += width.part  # its output
        gradients = (1 + (not self._is_last)) * width.part  # of its output, and what the next stage sends

        if self.kernels is Kernels.cpu:
            return (
                tokens
                * (again + gradients + max(3 * width.gate, self._sparse.beside) + 2 * width.whole)
                * self._element
            )

        # elements of the MLP's two matrices
        first = 2 * width.gate * width.whole
        second = width.gate * width.whole

        # In the activation, the product's gradient in the place of the product, that of gate and up, and two
        # steps towards it; in the second matrix its output's gradient whole, in the first its input's, and
        # the matrix's own; in attention by products, theirs.
        inside = max(
            tokens * 4 * width.gate,
            tokens * (width.whole + width.gate) + second,
            tokens * (width.whole + width.part - width.gate) + first,
            tokens * (3 * width.squares + 2 * width.query - 3 * width.gate),
            tokens * (self._way_back_of_attention_apart - 3 * width.gate),
            tokens * self._sparse.beside,
        )

        # A tied embedding has its gradient from the head until it has its own.
        tied = (
            self._architecture.tie_word_embeddings
            and self._is_first
            and self._is_last
            and not self._role.with_value_head
        )
        return (tokens * (again + gradients) + inside + tied * self._vocabulary * width.whole) * self._element

    @property
    def _way_back_of_attention_apart(self) -> int:
        """Elements of a token, as `_attention_apart`; gradients of keys and values as pieces saw them are
        added up into those of all."""
        width = self._widths
        if self._context > 1:
            again = RecomputeModule.core_attn in self._modules_again  # the keys and values are gathered again
            gathered = (2 + again) * self._context + (1 + again) * self._keys_of_token
            return (2 + again) * width.query + ceil(2 * width.key * gathered)

        return (6 * width.query + 6 * width.key) * self._shares_prompts

    def _way_back_of_head(self, tokens: int) -> int:
        """Hidden states that were scored, and their gradient; of a critic that of all, whole. Of a language
        model a chunk's logits, those kept of the last, and the gradient before; and either what the output
        layer's gradient gets of it, or the probabilities of which the next gradient is made."""
        hidden = tokens * self._widths.whole * self._element
        if self._role.with_value_head:
            return 3 * hidden
        rows = self._vocabulary * self._widths.whole
        chunk = self._chunk(tokens)
        logits = 1 + (tokens > self._chunk_tokens)
        inside = chunk * logits * _FLOAT32 + max(rows * self._element, self._block(tokens) * _FLOAT32)
        received = tokens * self._widths.part * self._element

        return 2 * hidden + received + chunk * self._element + inside

    def _way_back_of_embedding(self, tokens: int) -> int:
        return (tokens * 2 * self._widths.whole + self._vocabulary * self._widths.whole) * self._element
