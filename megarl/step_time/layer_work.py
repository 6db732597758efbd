"""Forward and backward passes of one layer on one rank: attention, gated delta net, MLP or experts. Pure."""

from __future__ import annotations

from typing import NamedTuple

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture, DeltaNet, Experts, LatentAttention
from megarl.models.mapping import EXPERT
from megarl.step_time.collectives import call
from megarl.step_time.counts import NOTHING, Counts, total
from megarl.step_time.linears import Linears, linears_of, mlp_work
from megarl.step_time.packed_batch import KeyExchange, PackedBatch
from megarl.step_time.work import IDLE, Edge, PassCounts, joined, linear

_QKV = "self_attention.linear_qkv"
_OUTPUT = "self_attention.linear_proj"
_LATENT = "self_attention.linear_"


class LayerTraits(NamedTuple):
    """The properties that distinguish the layers of a model.

    Attributes:
        window: The number of tokens that a token sees; 0 means all.
        is_delta: Whether it has a gated delta net instead of attention.
        is_sparse: Whether it has experts.
        drops_tokens: Whether it keeps only the tokens that predict another one after its attention.
    """

    window: int = 0
    is_delta: bool = False
    is_sparse: bool = False
    drops_tokens: bool = False


class LayerWork(NamedTuple):
    """The parts of a layer.

    Attributes:
        mixer: The linear layers of attention, with their calls, or a whole gated delta net.
        core: Attention without its linear layers.
        feed_forward: The MLP or the experts, with their calls.
    """

    mixer: PassCounts
    core: PassCounts
    feed_forward: PassCounts


def traits_of(architecture: Architecture, layer: int) -> LayerTraits:
    """Return the traits of a layer, given by its number in the whole model."""
    return LayerTraits(
        window=architecture.windows[layer] if architecture.windows else 0,
        is_delta=layer in architecture.delta_layers,
        is_sparse=layer in architecture.sparse_layers,
        drops_tokens=layer == architecture.num_hidden_layers - 1 and not architecture.sparse_layers,
    )


def layer_work(
    architecture: Architecture, parallel: ParallelConfig, traits: LayerTraits, batch: PackedBatch, dtype: str
) -> LayerWork:
    """Return the work of a layer for a micro-batch."""
    edge = Edge(parallel, batch.tokens, architecture.hidden_size, dtype)
    linears = linears_of(architecture)

    if traits.is_sparse:
        assert architecture.experts is not None
        feed_forward = expert_work(architecture.experts, linears, edge)
    else:
        after = edge._replace(tokens=batch.kept) if traits.drops_tokens else edge
        feed_forward = mlp_work(linears, "mlp", after, architecture.intermediate_size)

    if traits.is_delta:
        assert architecture.delta_net is not None
        return LayerWork(delta_net_work(architecture.delta_net, edge, batch), IDLE, feed_forward)
    return LayerWork(
        projections(architecture, edge),
        core(architecture, parallel, traits.window, batch, dtype),
        feed_forward,
    )


def projections(architecture: Architecture, edge: Edge) -> PassCounts:
    """Return the work of the linear layers before and after attention."""
    linears = linears_of(architecture)
    shards = edge.parallel.tensor_parallel_size
    query = architecture.num_attention_heads * architecture.head_dim // shards
    if architecture.latent is not None:
        values = architecture.num_attention_heads * architecture.value_dim // shards
        inputs = _latent_inputs(linears, architecture, architecture.latent, edge)
        return joined((inputs, linears.row_parallel(_OUTPUT, values, edge)))

    key = architecture.num_key_value_heads * architecture.head_dim // shards
    # The gate of the output is as wide as the queries.
    columns = (1 + architecture.has_output_gate) * query + 2 * key
    return joined((linears.column_parallel(_QKV, edge, columns), linears.row_parallel(_OUTPUT, query, edge)))


def _latent_inputs(
    linears: Linears, architecture: Architecture, latent: LatentAttention, edge: Edge
) -> PassCounts:
    """Return the work of the projections of multi-head latent attention before its core.

    Every rank computes the latent vectors of its own tokens. Queries, keys and values of its heads follow
    from the latent vectors of all tokens, as do the rotated parts of keys.
    """
    heads = architecture.num_attention_heads // edge.parallel.tensor_parallel_size
    rank = latent.q_lora_rank
    query = heads * architecture.head_dim
    key_value = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    latents = edge._replace(width=latent.kv_lora_rank)

    parts = [
        linears.replicated(f"{_LATENT}kv_down_proj", edge, latent.kv_lora_rank + latent.qk_rope_head_dim),
        edge._replace(width=latent.qk_rope_head_dim).entered(trains=False),
        linears.column_parallel(f"{_LATENT}kv_up_proj", latents, key_value),
    ]
    if rank is None:
        parts.append(linears.column_parallel(f"{_LATENT}q_proj", edge, query))
    else:
        parts += [
            linears.replicated(f"{_LATENT}q_down_proj", edge, rank),
            linears.column_parallel(f"{_LATENT}q_up_proj", edge._replace(width=rank), query),
        ]

    return joined(parts)


def core(
    architecture: Architecture, parallel: ParallelConfig, window: int, batch: PackedBatch, dtype: str
) -> PassCounts:
    """Return the attention of all heads of a rank.

    The forward pass has two products per pair of a query and a key: one with the key, one with the value. The
    backward pass has the gradients of both inputs of both, and fused kernels, which do not save the first
    product, repeat it. With latent attention, values are padded to the size of keys.
    """
    product = 2 * architecture.num_attention_heads // parallel.tensor_parallel_size * architecture.head_dim
    forward = 2 * product
    backward = (4 if dtype == "float32" else 5) * product
    pairs = batch.share * sum(each.queries * each.keys for each in batch.attention)
    masked = batch.share * sum(each.pairs(window) for each in batch.attention)

    return joined(
        (
            PassCounts(
                Counts(attention_flops=forward * pairs, masked_attention_flops=forward * masked),
                Counts(attention_flops=backward * pairs, masked_attention_flops=backward * masked),
            ),
            _key_exchange(architecture, parallel, batch, dtype),
        )
    )


def _key_exchange(
    architecture: Architecture, parallel: ParallelConfig, batch: PackedBatch, dtype: str
) -> PassCounts:
    """Return the calls by which context-parallel ranks see each other's keys and values.

    In a ring, each rank passes on the keys and values of the others, and in the backward pass their gradients
    with them: the first message has no gradients yet, and the last one has nothing else.
    """
    ranks = parallel.context_parallel_size
    if ranks == 1:
        return IDLE

    # With latent attention, every head has its own keys and values.
    heads = architecture.num_attention_heads if architecture.latent else architecture.num_key_value_heads
    held = heads // parallel.tensor_parallel_size * 2 * architecture.head_dim * batch.tokens

    if batch.key_exchange is KeyExchange.gather:
        gathered, reduced = (
            call(parallel, kind, "context", ranks * held, dtype) for kind in ("all_gather", "reduce_scatter")
        )
        return PassCounts(gathered, reduced)

    def passed(calls: int, messages: int) -> Counts:
        size = held * messages / calls
        return total(call(parallel, kind, "context", size, dtype, calls) for kind in ("send", "recv"))

    return PassCounts(passed(ranks - 1, ranks - 1), passed(ranks, 2 * (ranks - 1)))


def delta_net_work(delta: DeltaNet, edge: Edge, batch: PackedBatch) -> PassCounts:
    """Return the work of a gated delta net, whose heads are distributed over tensor and context ranks."""
    shards = edge.parallel.tensor_parallel_size
    channels = (2 * delta.key_dim + delta.value_dim) // shards
    values = delta.value_dim // shards
    columns = channels + values + 2 * delta.num_value_heads // shards

    # The recurrence has three products per token and head, and twice as many in the backward pass.
    context = edge.parallel.context_parallel_size
    rule = 2 * 3 * batch.tokens_with_prompts * values // context * delta.key_head_dim
    exchanged = total(
        call(edge.parallel, "all_to_all", "context", batch.tokens * width, edge.dtype)
        for width in (columns, values)
    )
    # Each rank's heads contribute to the gradient of the norm of heads.
    of_norm = call(edge.parallel, "all_reduce", "tensor", delta.value_head_dim, edge.dtype)
    return joined(
        (
            edge.entered(),
            linear(edge.tokens, edge.width, columns),
            PassCounts(exchanged, exchanged),
            PassCounts(Counts((), rule, rule), Counts((), 2 * rule, 2 * rule)),
            PassCounts(NOTHING, of_norm),
            linear(edge.tokens, values, edge.width),
            edge.left(),
        )
    )


def expert_work(experts: Experts, linears: Linears, edge: Edge) -> PassCounts:
    """Return the work of router, dispatch, experts and the shared expert.

    Args:
        edge: The hidden states.
    """
    tokens = edge.own_tokens
    gate = linear(tokens, edge.width, 1, trains=not linears.is_frozen) if experts.has_shared_gate else IDLE
    return joined(
        (
            linear(tokens, edge.width, experts.num_experts),  # Megatron's router has both gradients always
            _exchanges(experts, edge, tokens),
            _experts(experts, linears, edge, tokens),
            mlp_work(linears, "mlp.shared_experts", edge, experts.shared_intermediate_size),
            gate,
        )
    )


def _exchanges(experts: Experts, edge: Edge, tokens: int) -> PassCounts:
    """Return the calls that bring tokens to their experts and back.

    The ranks tell each other how many tokens come, which the backward pass knows. Then they send tokens and
    the weights of their experts, and the results. The backward pass sends as much the other way.
    """
    parallel = edge.parallel
    sent = tokens * experts.num_experts_per_tok
    ranks = parallel.expert_parallel_size * parallel.expert_tensor_parallel_size
    counted = call(parallel, "all_gather", "expert_stage", ranks * experts.num_experts, "int64")
    both_ways = total(
        (
            call(parallel, "all_to_all", "expert", sent * edge.width, edge.dtype, 2),
            call(parallel, "all_to_all", "expert", sent, "float32"),
        )
    )
    return joined((PassCounts(total((counted, both_ways)), both_ways), _shared_inputs(edge, sent)))


def _shared_inputs(edge: Edge, sent: int) -> PassCounts:
    """Return the calls between ranks that have parts of the same experts.

    They gather tokens and weights, and sum their results in float32.
    """
    parallel = edge.parallel
    gathered = sent * parallel.expert_tensor_parallel_size

    def moved(kind: str, width: int, dtype: str) -> Counts:
        return call(parallel, kind, "expert_tensor", gathered * width, dtype)

    inputs, gradients = (
        total((moved(kind, edge.width, edge.dtype), moved(kind, 1, "float32")))
        for kind in ("all_gather", "reduce_scatter")
    )
    return joined(
        (
            PassCounts(inputs, gradients),
            PassCounts(
                moved("reduce_scatter", edge.width, "float32"), moved("all_gather", edge.width, "float32")
            ),
        )
    )


def _experts(experts: Experts, linears: Linears, edge: Edge, tokens: int) -> PassCounts:
    """Return the products of this rank's experts. All ranks that have a part of an expert get its tokens."""
    shards = edge.parallel.expert_tensor_parallel_size
    held = experts.num_experts // edge.parallel.expert_parallel_size
    rows = tokens * experts.num_experts_per_tok * shards / held
    size = experts.intermediate_size // shards
    return joined(
        (
            linears.of_experts(f"{EXPERT}linear_fc1", rows, edge.width, 2 * size, shards, held),
            linears.of_experts(f"{EXPERT}linear_fc2", rows, size, edge.width, 1, held),
            linears.replicated_of_experts(edge, held),
        )
    )
