"""Memory of the parts of a layer at work, in elements of the weights' dtype per token of a micro-batch. Pure.

Each kind of part has one function, and `ACTIVATIONS` is their table. Vision towers, which are no part of a
layer, have their memory in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import NamedTuple

from megarl.config.batch_arithmetic import Row
from megarl.config.roles import ModelRole
from megarl.config.schema import ParallelConfig, Recompute
from megarl.models.architecture import Activation, Architecture, QKNorm
from megarl.models.delta_net import DELTA_NET
from megarl.models.experts import EXPERTS, experts_of
from megarl.models.latent import LATENT_ATTENTION
from megarl.models.part_kind import PartKind
from megarl.models.tensor_part import size_of
from megarl.models.tensor_table import dimension_sizes
from megarl.models.trunk import ATTENTION, MLP, SINK_ATTENTION, WINDOWED_ATTENTION
from megarl.models.vision import Vision
from megarl.plan.placement.layer_sizes import Kernels, LayerWidths

_FLOAT32 = 4
_CHUNK = 64  # tokens that the kernels of gated delta nets process at a time


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


class PartInputs(NamedTuple):
    """The numbers that the memory of a part depends on.

    Attributes:
        kernels: The kernels of the run. On CUDA, flash-linear-attention is taken to be installed.
        element: The bytes of an element of the weights' dtype.
        width: The sizes of a layer's tensors.
        context: The number of ranks that share rows.
        keys_of_token: The keys that attention saves per token of the rank.
        keys_before: The keys up to each chunk of a context-parallel rank, per token of the rank.
        prompt_keys: The keys of shared prompts, per token of the rank.
        repeats: The tokens of all rows, each with its whole prompt, per token of the micro-batch.
        shares_prompts: Whether some rows of the run share a prompt.
        is_shared: Whether rows of this micro-batch share a prompt without copies of it.
        is_fused: Whether the layers are Transformer Engine's.
        packing: Whether rows are packed.
        core_again: Whether the core of attention is computed again in the backward pass.
        uneven: Whether the rank's first expert receives twice its share of the tokens.
    """

    architecture: Architecture
    parallel: ParallelConfig
    kernels: Kernels
    element: int
    width: LayerWidths
    context: int
    keys_of_token: float
    keys_before: float
    prompt_keys: float
    repeats: float
    shares_prompts: bool
    is_shared: bool
    is_fused: bool
    packing: bool
    core_again: bool
    uneven: bool


def _attention(inputs: PartInputs) -> PartMemory:
    """Return the memory of attention. An output gate is saved itself and as float32."""
    return PartMemory(
        _kept_gate(inputs) + _kept_by_attention(inputs), _backward_apart(inputs), _scoring_apart(inputs)
    )


def _kept_gate(inputs: PartInputs) -> int:
    return inputs.width.query * (2 + 4 // inputs.element) * inputs.architecture.has_output_gate


def _kept_by_attention(inputs: PartInputs) -> int:
    width = inputs.width
    has_norm = inputs.architecture.qk_norm
    if inputs.kernels is Kernels.cpu:
        return 4 * width.query + 3 * width.key + 3 * (width.query + width.key) * has_norm

    if inputs.kernels is Kernels.plain and not inputs.core_again:
        # Queries; for each of them its keys and values, laid out for the products; attention weights;
        # outputs.
        return (
            ceil((2 + 2 * inputs.keys_of_token) * width.query)
            + width.squares
            + (width.query + 2 * width.key) * has_norm
        )

    # The fused QKV output; RoPE-rotated queries and keys; values; outputs (laid out again without
    # packing); and one float32 value per head.
    head_numbers = 2 * width.query // inputs.architecture.head_dim
    normalized = width.query * has_norm  # laid out again if a rank has several query groups

    # Instead of the rank's own keys and values, those that its queries attend to are saved.
    if inputs.context > 1 and not inputs.core_again:
        # What the keys' norm saves: a copy of the keys, or, in local layers, the whole QKV output.
        normalized += (width.key if inputs.is_fused else width.query + 2 * width.key) * has_norm
        return 2 * width.query + ceil(2 * inputs.keys_of_token * width.key) + head_numbers + normalized
    return 3 * width.query + 4 * width.key + head_numbers + normalized + width.query * (not inputs.packing)


def _scoring_apart(inputs: PartInputs) -> int:
    """Return the elements per token in attention whose queries and keys are handled separately.

    With context parallelism: queries and outputs, and the keys and values of all ranks as received and as
    each part sees them. With shared prompts: queries, attention outputs, and their combination, weighted
    in float32; and prompts' keys and values.
    """
    width = inputs.width
    if inputs.context > 1 and inputs.is_shared:
        keys = 1 + inputs.context + inputs.keys_before + inputs.prompt_keys
        return 9 * width.query + ceil(2 * width.key * keys)
    if inputs.context > 1:
        return 2 * width.query + ceil(2 * width.key * (1 + inputs.context + inputs.keys_of_token))
    return (9 * width.query + 2 * width.key) * inputs.shares_prompts


def _backward_apart(inputs: PartInputs) -> int:
    """Return the elements per token in backward of `_scoring_apart`.

    Gradients of keys and values as each part sees them are accumulated into the gradients of all. A core that
    is computed again gathers keys and values again.
    """
    width = inputs.width
    again = inputs.core_again
    if inputs.context > 1 and inputs.is_shared:
        gathered = (2 + again) * inputs.context + 2 * inputs.keys_before + 2 * inputs.prompt_keys
        return (6 + again) * width.query + ceil(2 * width.key * gathered)
    if inputs.context > 1:
        gathered = (2 + again) * inputs.context + (1 + again) * inputs.keys_of_token
        return (2 + again) * width.query + ceil(2 * width.key * gathered)

    return (6 * width.query + 6 * width.key) * inputs.shares_prompts


def _latent_attention(inputs: PartInputs) -> PartMemory:
    """Return the memory of latent attention, whose values are padded to the size of keys.

    Local layers and Transformer Engine's save the same tensors.
    """
    memory = _attention(inputs)
    if inputs.kernels is not Kernels.flash:
        return memory

    sizes = dimension_sizes(inputs.architecture)
    cut = inputs.parallel.tensor_parallel_size
    part = cut if inputs.parallel.sequence_parallel else 1
    query = sizes["Q"] // cut
    value = sizes["O"] // cut

    # Both latent vectors before and after their norms, sharded with the tokens; the shared key is gathered.
    vectors = 2 * (sizes["A"] + sizes["C"]) / part + sizes["I"]

    # Queries, keys, values and outputs, and the output without its padding. If the core is computed again,
    # its inputs are saved, and the output without padding.
    if inputs.core_again:
        kept = ceil(vectors + 2 * query + 2 * value)
    else:
        keys_of_token = inputs.keys_of_token if inputs.context > 1 else 1.0
        numbers = 2 * inputs.architecture.num_attention_heads // cut  # one float32 value per head
        kept = ceil(vectors + 2 * query + 2 * keys_of_token * query + numbers + value)
    return memory._replace(kept=_kept_gate(inputs) + kept)


def _own_attention(inputs: PartInputs, *, has_sinks: bool) -> PartMemory:
    """Return the memory of attention with windows or sinks.

    The count follows `megarl.engine.sinks` on CUDA, whose kernel sees a copy of the keys for each piece of a
    sequence. Windows change the time of attention, not its memory.
    """
    memory = _attention(inputs)
    if inputs.kernels is not Kernels.flash:
        return memory

    architecture = inputs.architecture
    query = inputs.width.query
    key = inputs.width.key
    has_copies = inputs.shares_prompts or inputs.context > 1
    keys_of_token = inputs.keys_of_token if has_copies else 1.0
    seen = ceil(2 * keys_of_token * key)  # keys and values

    # Rotated queries; keys and values as seen; the output; one float32 value per head.
    kept = 2 * query + seen + 2 * query // architecture.head_dim
    if architecture.qk_norm:
        # The norms save what they normalize, which are views of the projection unless they copy it.
        of_all_heads = architecture.qk_norm_kind is QKNorm.all_heads
        kept += query + key if of_all_heads else 2 * query + 2 * key

    # The projection, rotated queries and keys, keys and values of all ranks, and the output. A sink scales
    # the output in float32.
    whole = 2 * key * (1 + inputs.context) * (inputs.context > 1)
    scoring = 3 * query + 3 * key + whole + seen + 5 * query * has_sinks

    # Gradients of the output, of queries, and of keys and values as seen and of each token. That of a sink
    # takes the output and its gradient in float32.
    backward = 2 * query + seen + 2 * key + whole + 6 * query * has_sinks
    return PartMemory(memory.kept if inputs.core_again else _kept_gate(inputs) + kept, backward, scoring)


def _delta_net(inputs: PartInputs) -> PartMemory:
    """Return the memory of a gated delta net. Context parallelism distributes heads instead of tokens."""
    sizes = dimension_sizes(inputs.architecture)
    repeats = inputs.repeats
    cut = inputs.parallel.tensor_parallel_size
    key = size_of("J X", sizes) // cut
    value = sizes["Z"] // cut
    heads = sizes["T"] // cut
    shared = heads * sizes["X"]  # the keys of all value heads
    number = 4 / inputs.element  # a float32 value, in elements
    projected = 2 * (key + value + heads)

    # In chunks, a token has float32 products with all tokens of its chunk, and its part of the states.
    chunk = heads * number * (_CHUNK + size_of("X Y", sizes) / _CHUNK)

    # Torch saves the inputs and the output, and computes everything between them again: queries, keys and
    # values, several times in float32, and several products with the tokens of a chunk.
    if inputs.kernels is not Kernels.flash:
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


def _mlp(inputs: PartInputs) -> PartMemory:
    """Return the memory of a dense feed-forward: gate, up and their product; on a CPU, the activated gate."""
    return PartMemory((3 + (inputs.kernels is Kernels.cpu)) * inputs.width.gate)


def _experts(inputs: PartInputs) -> PartMemory:
    """Return the memory of experts on the rank that holds expert 0.

    The count follows Megatron-Core's all-to-all dispatcher with local layers: a rank sends each of its tokens
    once to each selected expert, and sorts the tokens that it receives by expert.
    """
    architecture = inputs.architecture
    parallel = inputs.parallel
    experts = experts_of(architecture)
    hidden = architecture.hidden_size
    cut = parallel.expert_tensor_parallel_size

    # This rank's fraction of a micro-batch's tokens.
    own = 1 / (parallel.tensor_parallel_size if parallel.sequence_parallel else 1)
    sent = own * experts.num_experts_per_tok

    # Tokens that arrive at the rank's experts. With expert tensor parallelism, other ranks receive them too.
    come = sent * (_crowding(inputs) if inputs.uneven else 1)
    met = come * cut

    # The sizes of float32 and int64 values, in elements.
    number = 4 / inputs.element
    index = 8 / inputs.element

    # Per token: a number and a mark for each expert, and indices and weights of the selected ones. Per sent
    # token: its position. Per token at an expert: its weight.
    routing = own * (
        experts.num_experts * (number + 1 / inputs.element)
        + experts.num_experts_per_tok * (index + 2 * number)
    )
    routing += sent * index + met * number
    shared = experts.shared_intermediate_size
    of_shared = 3 * shared / parallel.tensor_parallel_size + own * (hidden + 2) * experts.has_shared_gate

    # Each expert's input, gate and up, and their product.
    kept = routing + met * (hidden + 3 * experts.intermediate_size / cut) + of_shared

    # Tokens as sent and as received, expert outputs, and their combination. Parts of a sharded expert are
    # summed in float32.
    transient = (sent + come + 2 * met) * hidden + (2 * met + come) * hidden * number * (cut > 1)
    # The activation's backward pass multiplies by the tokens' weights in float32. It has gradients of the
    # product and of gate and up, two temporaries, and the gradients of the expert's output and the product.
    inner = experts.intermediate_size / cut
    backward = met * (hidden + inner * (1 + 5 * number)) * (architecture.activation is Activation.silu)
    return PartMemory(ceil(kept), ceil(max(transient, backward)), ceil(transient + routing + met * hidden))


def _crowding(inputs: PartInputs) -> float:
    """Return a rank's tokens, relative to its share, if its first expert receives twice its share."""
    sizes = dimension_sizes(inputs.architecture)
    num_experts = sizes["E"]
    held = num_experts // inputs.parallel.expert_parallel_size
    others = num_experts - 1
    most = num_experts / sizes["e"]  # the expert gets every token
    first = min(2.0, most)
    return (first + (held - 1) * (num_experts - first) / others) / held if others else 1.0


ACTIVATIONS: dict[PartKind, Callable[[PartInputs], PartMemory]] = {
    ATTENTION: _attention,
    SINK_ATTENTION: partial(_own_attention, has_sinks=True),
    WINDOWED_ATTENTION: partial(_own_attention, has_sinks=False),
    LATENT_ATTENTION: _latent_attention,
    DELTA_NET: _delta_net,
    MLP: _mlp,
    EXPERTS: _experts,
}


def _image_patches(rows: Sequence[Row], vision: Vision) -> int:
    """Return the most patches that the prompts of a micro-batch may have.

    Any token of a prompt may be an image's. Samples share their prompt's images.
    """
    longest_of_prompt = {row.prompt_number: row.prompt for row in rows}
    return sum(longest_of_prompt.values()) * vision.patches_per_token


def tower_bytes(role: ModelRole, vision: Vision, rows: Sequence[Row], element: int, *, trains: bool) -> int:
    """Return the bytes of a tower's activations in one micro-batch, on the first pipeline stage.

    They are upper bounds: queries and keys are rotated in float32, and blocks keep what autograd saves.

    Args:
        element: The bytes of an activation.
        trains: Whether the pass has gradients.
    """
    patches = _image_patches(rows, vision)
    width = vision.hidden_size

    # Per patch: norms, queries, keys and values, attention and its output; rotated queries and keys in
    # float32; and the feed-forward.
    block = element * (12 * width + 5 * vision.intermediate_size) + _FLOAT32 * 6 * width
    inputs = vision.patch_elements * (_FLOAT32 + element)
    outputs = element * (1 + len(vision.deepstack_blocks)) * (2 * width + 2 * vision.out_hidden_size)

    keeps = trains and not role.freeze_vision
    if not keeps:
        blocks = 2 * block
    elif role.recomputation.how is Recompute.full:
        blocks = vision.depth * element * width + 2 * block
    else:
        blocks = vision.depth * block
    return patches * (inputs + outputs + blocks)
