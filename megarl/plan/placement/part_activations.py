"""Memory of the parts of a layer at work, in elements of the weights' dtype per token of a micro-batch. Pure.

Each kind of part has one function, and `ACTIVATIONS` is their table. Vision towers, which are no part of a
layer, have their memory in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import NamedTuple

from megarl.config.batch_arithmetic import (
    Row,
    longest_row,
    micro_batch_tokens,
    rows_of_prompt,
    shares_a_prompt,
)
from megarl.config.roles import ModelRole
from megarl.config.schema import Layers, Recompute, RecomputeModule, RunConfig
from megarl.models.architecture import Architecture, Experts, QKNorm
from megarl.models.delta_net import DELTA_NET
from megarl.models.experts import EXPERTS
from megarl.models.latent import LATENT_ATTENTION
from megarl.models.layers import has_dense_layers, replaces_core
from megarl.models.mamba import MAMBA
from megarl.models.mapping import PartKind, size_of
from megarl.models.sparse_attention import (
    BLOCK_QUERIES,
    MOST_SCORES,
    REUSED_SELECTION,
    SPARSE_ATTENTION,
    indexer_of,
)
from megarl.models.tensor_table import dimension_sizes
from megarl.models.trunk import ATTENTION, MLP, SINK_ATTENTION, WINDOWED_ATTENTION
from megarl.models.vision import Vision
from megarl.plan.placement.layer_sizes import Kernels, always_gathers, kernels_of, layer_kind
from megarl.plan.placement.model_state import weight_bytes

_FLOAT32 = 4
_CHUNK = 64  # tokens that the kernels of gated delta nets process at a time
_MAMBA_CHUNK = 128  # and those of Mamba-2 mixers


class PartMemory(NamedTuple):
    """The memory of a part of a layer without its norms, in elements of the weights' dtype per token.

    Attributes:
        kept: Saved activations.
        backward: The peak of the backward pass in addition to saved activations.
        scoring: The peak of a forward pass that saves nothing, in addition to hidden states.
    """

    kept: int = 0
    backward: int = 0
    scoring: int = 0


class LayerSizes:
    """The sizes on which the memory of a layer depends, on one rank.

    Sizes of tensors are in elements per token.

    Args:
        rows: The rows of the fullest micro-batch.
        uneven: Whether the rank's first expert receives twice its share of the tokens.

    Attributes:
        kernels: The kernels of the run. On CUDA, the packages of recurrences are taken to be installed.
        element: The bytes of an element of the weights' dtype.
        longest: The tokens of the longest row.
        tokens: The tokens of the micro-batch on the rank.
        whole: A hidden state.
        part: A hidden state, sharded if sequence parallelism is on.
        key: The keys; the values have the same size.
        gate: The gate of the MLP; up has the same size.
        squares: One row of the product of queries and keys per head, if attention materializes it.
        context: The number of ranks that share rows.
        keys_of_token: The keys that attention saves per token of the rank.
        keys_before: The keys up to each chunk of a context-parallel rank, per token of the rank.
        prompt_keys: The keys of shared prompts, per token of the rank.
        repeats: The tokens of all rows, each with its whole prompt, per token of the micro-batch.
        shares_prompts: Whether some rows of the run share a prompt.
        is_shared: Whether rows of this micro-batch share a prompt without copies of it.
        is_fused: Whether the layers are Transformer Engine's.
        core_again: Whether the core of attention is computed again in the backward pass.
    """

    def __init__(
        self, config: RunConfig, role: ModelRole, architecture: Architecture, rows: list[Row], *, uneven: bool
    ) -> None:
        self.architecture = architecture
        self.parallel = parallel = role.parallel
        self.kernels = kernels_of(config)
        self.element = weight_bytes(config.model.dtype)
        self.packing = config.engine.packing
        self.uneven = uneven
        how, modules, _ = role.recomputation
        self.core_again = how is Recompute.selective and RecomputeModule.core_attn in modules

        cut = parallel.tensor_parallel_size
        heads = architecture.num_attention_heads // cut
        self.longest = longest_row(config, role, architecture).tokens
        self.tokens = (
            micro_batch_tokens(rows, parallel.context_parallel_size) / parallel.context_parallel_size
        )
        self.whole = architecture.hidden_size
        self.part = self.whole // (cut if parallel.sequence_parallel else 1)
        self.query = heads * architecture.head_dim
        self.key = architecture.num_key_value_heads * architecture.head_dim // cut
        self.gate = architecture.intermediate_size // cut * has_dense_layers(architecture)
        self.squares = heads * self.longest * (self.kernels is Kernels.plain)

        self.context = parallel.context_parallel_size
        self.shares_prompts = rows_of_prompt(config, role) > 1
        self.is_fused = layer_kind(config) is Layers.transformer_engine
        kind = Layers.transformer_engine if self.is_fused else Layers.local
        has_pieces = self.kernels is not Kernels.flash or replaces_core(architecture)
        self.is_shared = shares_a_prompt(config, role, rows) and not has_pieces
        self.keys_before = (2 * self.context + 1) / 2
        gathers = has_pieces or always_gathers(config, architecture, kind)
        self.keys_of_token = self._saved_keys(rows, has_pieces=has_pieces, gathers=gathers)
        num_rows = Counter(row.prompt_number for row in rows)
        prompts = {row.prompt_number: row.prompt for row in rows if num_rows[row.prompt_number] > 1}
        self.prompt_keys = sum(prompts.values()) * self.context / micro_batch_tokens(rows, self.context)

        each_with_prompt = sum(row.tokens for row in rows) / micro_batch_tokens(rows, 1)
        self.repeats = max(1.0, each_with_prompt) if self.shares_prompts else 1.0

    def _saved_keys(self, rows: list[Row], *, has_pieces: bool, gathers: bool) -> float:
        """Return the number of keys that attention saves per token of the rank.

        In pieces, responses that share a prompt each have its keys in addition to their own, and the prompt
        has them too. With context parallelism, each rank has two chunks of every sequence, with all keys
        before them; if rows share a prompt, one copy of all keys; and in a ring, its own keys.

        Args:
            gathers: Whether context-parallel ranks gather keys in every micro-batch.
        """
        tokens = micro_batch_tokens(rows, self.context)
        prompts = sum(row.prompt for row in rows) * self.shares_prompts * has_pieces
        if self.context == 1:
            return (tokens + prompts) / tokens
        # A micro-batch of this size without shared prompts saves half a key more where ranks always gather.
        if gathers:
            return self.keys_before + 2 * prompts * self.context / tokens
        return float(self.context) if self.is_shared else 1.0


def _attention(layer: LayerSizes) -> PartMemory:
    """Return the memory of attention. An output gate is saved itself and as float32."""
    return PartMemory(
        _kept_gate(layer) + _kept_by_attention(layer), _backward_apart(layer), _scoring_apart(layer)
    )


def _kept_gate(layer: LayerSizes) -> int:
    return layer.query * (2 + 4 // layer.element) * layer.architecture.has_output_gate


def _kept_by_attention(layer: LayerSizes) -> int:
    has_norm = layer.architecture.qk_norm
    if layer.kernels is Kernels.cpu:
        return 4 * layer.query + 3 * layer.key + 3 * (layer.query + layer.key) * has_norm

    if layer.kernels is Kernels.plain and not layer.core_again:
        # Queries; for each of them its keys and values, laid out for the products; attention weights;
        # outputs.
        return (
            ceil((2 + 2 * layer.keys_of_token) * layer.query)
            + layer.squares
            + (layer.query + 2 * layer.key) * has_norm
        )

    # The fused QKV output; RoPE-rotated queries and keys; values; outputs (laid out again without
    # packing); and one float32 value per head.
    head_numbers = 2 * layer.query // layer.architecture.head_dim
    normalized = layer.query * has_norm  # laid out again if a rank has several query groups

    # Instead of the rank's own keys and values, those that its queries attend to are saved.
    if layer.context > 1 and not layer.core_again:
        # What the keys' norm saves: a copy of the keys, or, in local layers, the whole QKV output.
        normalized += (layer.key if layer.is_fused else layer.query + 2 * layer.key) * has_norm
        return 2 * layer.query + ceil(2 * layer.keys_of_token * layer.key) + head_numbers + normalized
    return 3 * layer.query + 4 * layer.key + head_numbers + normalized + layer.query * (not layer.packing)


def _scoring_apart(layer: LayerSizes) -> int:
    """Return the elements per token in attention whose queries and keys are handled separately.

    With context parallelism: queries and outputs, and the keys and values of all ranks as received and as
    each part sees them. With shared prompts: queries, attention outputs, and their combination, weighted
    in float32; and prompts' keys and values.
    """
    if layer.context > 1 and layer.is_shared:
        keys = 1 + layer.context + layer.keys_before + layer.prompt_keys
        return 9 * layer.query + ceil(2 * layer.key * keys)
    if layer.context > 1:
        return 2 * layer.query + ceil(2 * layer.key * (1 + layer.context + layer.keys_of_token))
    return (9 * layer.query + 2 * layer.key) * layer.shares_prompts


def _backward_apart(layer: LayerSizes) -> int:
    """Return the elements per token in backward of `_scoring_apart`.

    Gradients of keys and values as each part sees them are accumulated into the gradients of all. A core that
    is computed again gathers keys and values again.
    """
    again = layer.core_again
    if layer.context > 1 and layer.is_shared:
        gathered = (2 + again) * layer.context + 2 * layer.keys_before + 2 * layer.prompt_keys
        return (6 + again) * layer.query + ceil(2 * layer.key * gathered)
    if layer.context > 1:
        gathered = (2 + again) * layer.context + (1 + again) * layer.keys_of_token
        return (2 + again) * layer.query + ceil(2 * layer.key * gathered)

    return (6 * layer.query + 6 * layer.key) * layer.shares_prompts


def _latent_attention(layer: LayerSizes) -> PartMemory:
    """Return the memory of latent attention, whose values are padded to the size of keys.

    Local layers and Transformer Engine's save the same tensors.
    """
    memory = _attention(layer)
    if layer.kernels is not Kernels.flash:
        return memory

    sizes = dimension_sizes(layer.architecture)
    cut = layer.parallel.tensor_parallel_size
    part = cut if layer.parallel.sequence_parallel else 1
    query = sizes["Q"] // cut
    value = sizes["O"] // cut

    # Both latent vectors before and after their norms, sharded with the tokens; the shared key is gathered.
    vectors = 2 * (sizes["A"] + sizes["C"]) / part + sizes["I"]

    # Queries, keys, values and outputs, and the output without its padding. If the core is computed again,
    # its inputs are saved, and the output without padding.
    if layer.core_again:
        kept = ceil(vectors + 2 * query + 2 * value)
    else:
        keys_of_token = layer.keys_of_token if layer.context > 1 else 1.0
        numbers = 2 * layer.architecture.num_attention_heads // cut  # one float32 value per head
        kept = ceil(vectors + 2 * query + 2 * keys_of_token * query + numbers + value)
    return memory._replace(kept=_kept_gate(layer) + kept)


def _sparse_attention(layer: LayerSizes, *, has_indexer: bool) -> PartMemory:
    """Return the memory of latent attention over selected keys, as `megarl.engine.sparse_attention` has it.

    In rows of at most as many tokens as an indexer selects it is latent attention. Otherwise the queries, the
    keys and values of all ranks, and the selection are saved, and attention is computed again.
    """
    memory = _latent_attention(layer)
    indexer = indexer_of(layer.architecture)
    trains = has_indexer and indexer.trains
    if layer.longest <= indexer.topk:
        return _with_indexer_loss(layer, memory) if trains else memory

    sizes = dimension_sizes(layer.architecture)
    cut = layer.parallel.tensor_parallel_size
    part = cut if layer.parallel.sequence_parallel else 1
    query = sizes["Q"] // cut
    keys = 2 * layer.context * query  # and values
    selection = indexer.topk * _FLOAT32 / layer.element

    vectors = 2 * (sizes["A"] + sizes["C"]) / part + sizes["I"]
    kept = ceil(vectors + query + keys + selection + sizes["O"] // cut)
    if layer.core_again:
        kept = memory.kept

    # A block of queries has a mask of its keys, and places of the selected ones in 8 bytes; its scores are
    # float32, and a second time while the best are found. Pieces have copies of their keys.
    block = BLOCK_QUERIES * (layer.longest * (1 + layer.element) + 8 * indexer.topk)
    scores = has_indexer * 2 * _FLOAT32 * MOST_SCORES
    apart = max(block, scores) / layer.element / layer.tokens
    inputs = has_indexer * (layer.whole + sizes["A"] + 2 * sizes["i"] + sizes["j"] * (1 + layer.context))
    memory = PartMemory(
        kept,
        backward=ceil(2 * query + 3 * keys + selection + inputs + apart),
        scoring=ceil(2 * query + 2 * keys + selection + inputs + apart),
    )
    return _with_indexer_loss(layer, memory) if trains else memory


def _with_indexer_loss(layer: LayerSizes, memory: PartMemory) -> PartMemory:
    """Return the memory of sparse attention whose indexer also learns. Its loss is part of every length."""
    sizes = dimension_sizes(layer.architecture)
    number = _FLOAT32 / layer.element
    query = sizes["Q"] // layer.parallel.tensor_parallel_size

    # The inputs of the indexer, hidden states also in float32; and its queries, keys and weights, each with a
    # gradient.
    kept = layer.whole * (1 + number) + sizes["A"] + 2 * (sizes["i"] + sizes["j"] * layer.context)
    kept += 2 * sizes["k"] * number

    # Scores of a block and two gradients of them, and a float32 copy of the keys of a piece.
    block = (3 * MOST_SCORES + layer.longest * query) * number / layer.tokens
    apart = block + number * (sizes["i"] + sizes["j"] * layer.context)
    again = kept * layer.core_again
    return memory._replace(
        kept=ceil(memory.kept + kept - again), backward=ceil(memory.backward + again + apart)
    )


def _own_attention(layer: LayerSizes, *, has_sinks: bool) -> PartMemory:
    """Return the memory of attention with windows or sinks.

    The count follows `megarl.engine.sinks` on CUDA, whose kernel sees a copy of the keys for each piece of a
    sequence. Windows change the time of attention, not its memory.
    """
    memory = _attention(layer)
    if layer.kernels is not Kernels.flash:
        return memory

    architecture = layer.architecture
    query = layer.query
    key = layer.key
    keys_of_token = layer.keys_of_token if layer.shares_prompts or layer.context > 1 else 1.0
    seen = ceil(2 * keys_of_token * key)  # keys and values

    # Rotated queries; keys and values as seen; the output; one float32 value per head.
    kept = 2 * query + seen + 2 * query // architecture.head_dim
    if architecture.qk_norm:
        # The norms save what they normalize, which are views of the projection unless they copy it.
        kept += query + key if architecture.qk_norm_kind is QKNorm.all_heads else 2 * query + 2 * key

    # The projection, rotated queries and keys, keys and values of all ranks, and the output. A sink scales
    # the output in float32.
    whole = 2 * key * (1 + layer.context) * (layer.context > 1)
    scoring = 3 * query + 3 * key + whole + seen + 5 * query * has_sinks

    # Gradients of the output, of queries, and of keys and values as seen and of each token. That of a sink
    # takes the output and its gradient in float32.
    backward = 2 * query + seen + 2 * key + whole + 6 * query * has_sinks
    return PartMemory(memory.kept if layer.core_again else _kept_gate(layer) + kept, backward, scoring)


def _delta_net(layer: LayerSizes) -> PartMemory:
    """Return the memory of a gated delta net. Context parallelism distributes heads instead of tokens."""
    sizes = dimension_sizes(layer.architecture)
    repeats = layer.repeats
    cut = layer.parallel.tensor_parallel_size
    key = size_of("J X", sizes) // cut
    value = sizes["Z"] // cut
    heads = sizes["T"] // cut
    shared = heads * sizes["X"]  # the keys of all value heads
    number = 4 / layer.element  # a float32 value, in elements
    projected = 2 * (key + value + heads)

    # In chunks, a token has float32 products with all tokens of its chunk, and its part of the states.
    chunk = heads * number * (_CHUNK + size_of("X Y", sizes) / _CHUNK)

    # Torch saves the inputs and the output, and computes everything between them again: queries, keys and
    # values, several times in float32, and several products with the tokens of a chunk.
    if layer.kernels is not Kernels.flash:
        again = number * (2 * key + value + 8 * shared + 8 * value) + 4 * chunk
        wide = ceil(repeats * (projected + again))
        return PartMemory(ceil(repeats * projected + value), 2 * wide, wide)

    # The kernels save the input of the convolution; its output; normalized queries and keys, also as all
    # value heads see them; values; decay and strength; a product of each token with its chunk; the outputs
    # before and after the gated norm.
    kept = (
        projected + (2 * key + value) + 2 * key + 2 * shared + value + heads * (number + 1 + _CHUNK) + value
    )
    # Gradients of all of these, and the states of all chunks.
    transient = kept + chunk + 2 * number * value
    return PartMemory(ceil(repeats * kept + value), ceil(repeats * transient), ceil(repeats * (kept + chunk)))


def _mamba(layer: LayerSizes) -> PartMemory:
    """Return the memory of a Mamba-2 mixer. Context parallelism distributes heads instead of tokens."""
    sizes = dimension_sizes(layer.architecture)
    repeats = layer.repeats
    cut = layer.parallel.tensor_parallel_size
    value = sizes["Z"] // cut
    groups = sizes["J"] // cut
    heads = sizes["T"] // cut
    number = 4 / layer.element  # a float32 value, in elements
    channels = value + 2 * groups * sizes["X"]
    projected = value + channels + heads

    # Torch saves the inputs and the output, and computes everything between them again: what the convolution
    # sees, several times in float32; both vectors as all heads see them; several products with the tokens of
    # a chunk; and a token's part of the states.
    if layer.kernels is not Kernels.flash:
        chunk = heads * number * (_CHUNK + size_of("X Y", sizes) / _CHUNK)
        again = number * (3 * channels + 6 * heads * sizes["X"] + 6 * value) + 4 * chunk
        wide = ceil(repeats * (projected + again))
        return PartMemory(ceil(repeats * projected + value), 2 * wide, wide)

    # The kernel saves its input, the outputs before and after the gated norm, and a number for each group.
    # It computes what the convolution sees, time steps, and the products and states of chunks again.
    kept = projected + 2 * value + groups * number
    chunk = groups * number * _MAMBA_CHUNK + heads * number * (2 + size_of("X Y", sizes) / _MAMBA_CHUNK)
    transient = projected + 2 * channels + 2 * chunk + heads * number * sizes["X"] / sizes["Y"]
    return PartMemory(
        ceil(repeats * kept + value), ceil(repeats * transient), ceil(repeats * (kept + channels + chunk))
    )


def _experts(layer: LayerSizes) -> PartMemory:
    """Return the memory of experts on the rank that holds expert 0.

    The count follows Megatron-Core's all-to-all dispatcher with local layers: a rank sends each of its tokens
    once to each selected expert, and sorts the tokens that it receives by expert.
    """
    architecture = layer.architecture
    parallel = layer.parallel
    experts = architecture.sizes_of(Experts)
    hidden = architecture.hidden_size
    cut = parallel.expert_tensor_parallel_size

    # This rank's fraction of a micro-batch's tokens.
    own = 1 / (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
    sent = own * experts.num_experts_per_tok

    # Tokens that arrive at the rank's experts. With expert tensor parallelism, other ranks receive them too.
    come = sent * (_crowding(layer) if layer.uneven else 1)
    met = come * cut

    # The sizes of float32 and int64 values, in elements.
    number = 4 / layer.element
    index = 8 / layer.element

    # Per token: a number and a mark for each expert, and indices and weights of the selected ones. Per sent
    # token: its position. Per token at an expert: its weight.
    routing = own * (
        experts.num_experts * (number + 1 / layer.element)
        + experts.num_experts_per_tok * (index + 2 * number)
    )
    routing += sent * index + met * number
    shared = experts.shared_intermediate_size
    outputs = _outputs_of_mlp(layer)
    of_shared = outputs * shared / parallel.tensor_parallel_size
    of_shared += own * (hidden + 2) * experts.has_shared_gate

    # Each expert's input, and the outputs of its first matrix and of the activation.
    kept = routing + met * (hidden + outputs * experts.intermediate_size / cut) + of_shared

    # Tokens as sent and as received, expert outputs, and their combination. Parts of a sharded expert are
    # summed in float32.
    transient = (sent + come + 2 * met) * hidden + (2 * met + come) * hidden * number * (cut > 1)
    # The activation's backward pass multiplies by the tokens' weights in float32. It has gradients of the
    # product and of gate and up, two temporaries, and the gradients of the expert's output and the product.
    inner = experts.intermediate_size / cut
    backward = met * (hidden + inner * (1 + 5 * number))
    return PartMemory(ceil(kept), ceil(max(transient, backward)), ceil(transient + routing + met * hidden))


def _outputs_of_mlp(layer: LayerSizes) -> int:
    """Return how many tensors a feed-forward saves: gate, up and their product; or up, and its activation."""
    return 2 + layer.architecture.activation.has_gate


def _crowding(layer: LayerSizes) -> float:
    """Return a rank's tokens, relative to its share, if its first expert receives twice its share."""
    sizes = dimension_sizes(layer.architecture)
    num_experts = sizes["E"]
    held = num_experts // layer.parallel.expert_parallel_size
    others = num_experts - 1
    first = min(2.0, num_experts / sizes["e"])
    return (first + (held - 1) * (num_experts - first) / others) / held if others else 1.0


ACTIVATIONS: dict[PartKind, Callable[[LayerSizes], PartMemory]] = {
    ATTENTION: _attention,
    SINK_ATTENTION: partial(_own_attention, has_sinks=True),
    WINDOWED_ATTENTION: partial(_own_attention, has_sinks=False),
    LATENT_ATTENTION: _latent_attention,
    SPARSE_ATTENTION: partial(_sparse_attention, has_indexer=True),
    REUSED_SELECTION: partial(_sparse_attention, has_indexer=False),
    DELTA_NET: _delta_net,
    MAMBA: _mamba,
    # On a CPU, also the activated gate.
    MLP: lambda layer: PartMemory((_outputs_of_mlp(layer) + (layer.kernels is Kernels.cpu)) * layer.gate),
    EXPERTS: _experts,
}


def tower_bytes(role: ModelRole, vision: Vision, rows: Sequence[Row], element: int, *, trains: bool) -> int:
    """Return the bytes of a tower's activations in one micro-batch, on the first pipeline stage.

    They are upper bounds: queries and keys are rotated in float32, and blocks keep what autograd saves.

    Args:
        element: The bytes of an activation.
        trains: Whether the pass has gradients.
    """
    # Any token of a prompt may be an image's. Samples share their prompt's images.
    prompts = {row.prompt_number: row.prompt for row in rows}
    patches = sum(prompts.values()) * vision.patches_per_token
    width = vision.hidden_size

    # Per patch: norms, queries, keys and values, attention and its output; rotated queries and keys in
    # float32; and the feed-forward.
    block = element * (12 * width + 5 * vision.intermediate_size) + _FLOAT32 * 6 * width
    inputs = vision.patch_elements * (_FLOAT32 + element)
    outputs = element * (1 + len(vision.deepstack_blocks)) * (2 * width + 2 * vision.out_hidden_size)

    if role.freeze_vision or not trains:
        blocks = 2 * block
    elif role.recomputation.how is Recompute.full:
        blocks = vision.depth * element * width + 2 * block
    else:
        blocks = vision.depth * block
    return patches * (inputs + outputs + blocks)
