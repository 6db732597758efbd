"""Forward and backward passes of a transformer layer on one rank, by the kinds of its parts. Pure."""

from __future__ import annotations

from typing import NamedTuple

from megarl.config.roles import ModelRole
from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.step_time.counts import Counts
from megarl.step_time.expert_work import expert_work
from megarl.step_time.packed_batch import PackedBatch
from megarl.step_time.work import Edge, PassCounts, joined, linear


class LayerTraits(NamedTuple):
    """The properties that distinguish the layers of a model.

    Attributes:
        window: The number of tokens that a token sees; 0 means all.
        is_sparse: Whether it has experts.
        drops_tokens: Whether it keeps only the tokens that predict another one after its attention.
    """

    window: int = 0
    is_sparse: bool = False
    drops_tokens: bool = False


class LayerWork(NamedTuple):
    """The parts of a layer.

    Attributes:
        projections: The linear layers of attention, with their calls.
        core: Attention without its linear layers.
        feed_forward: The MLP or the experts, with their calls.
    """

    projections: PassCounts
    core: PassCounts
    feed_forward: PassCounts


def kind_of(architecture: Architecture, layer: int) -> LayerTraits:
    """Return the kind of a layer, given by its number in the whole model."""
    return LayerTraits(
        window=architecture.windows[layer] if architecture.windows else 0,
        is_sparse=layer in architecture.sparse_layers,
        drops_tokens=layer == architecture.num_hidden_layers - 1 and not architecture.sparse_layers,
    )


def layer_work(
    architecture: Architecture, role: ModelRole, kind: LayerTraits, batch: PackedBatch, dtype: str
) -> LayerWork:
    """Return the work of a layer for a micro-batch."""
    whole = Edge(role.parallel, batch.tokens, architecture.hidden_size, dtype)
    after = whole._replace(tokens=batch.kept) if kind.drops_tokens else whole
    if kind.is_sparse:
        assert architecture.experts is not None
        trains = architecture.lora is None and not role.experts.freeze_router
        feed_forward = expert_work(architecture.experts, whole, router_trains=trains)
    else:
        feed_forward = _mlp(architecture, after)

    return LayerWork(
        projections=_projections(architecture, whole),
        core=_core(architecture, role.parallel, kind.window, batch),
        feed_forward=feed_forward,
    )


def _projections(architecture: Architecture, edge: Edge) -> PassCounts:
    shards = edge.parallel.tensor_parallel_size
    query = architecture.num_attention_heads * architecture.head_dim // shards
    key = architecture.num_key_value_heads * architecture.head_dim // shards
    columns = (1 + architecture.has_output_gate) * query + 2 * key
    return joined(
        (
            edge.entered(),
            linear(edge.tokens, edge.width, columns),
            linear(edge.tokens, query, edge.width),
            edge.left(),
        )
    )


def _core(
    architecture: Architecture, parallel: ParallelConfig, window: int, batch: PackedBatch
) -> PassCounts:
    """Return the attention of all heads of a rank.

    The forward pass has two products per pair of a query and a key: one with the key, one with the value. The
    backward pass of a fused kernel repeats the first, and has the gradients of both inputs of both.
    """
    heads = architecture.num_attention_heads // parallel.tensor_parallel_size
    forward = 2 * heads * (architecture.head_dim + architecture.value_dim)
    backward = 2 * heads * (3 * architecture.head_dim + 2 * architecture.value_dim)
    pairs = sum(each.queries * each.keys for each in batch.attention)
    masked = sum(each.pairs(window) for each in batch.attention)

    return PassCounts(
        Counts(attention_flops=forward * pairs, masked_attention_flops=forward * masked),
        Counts(attention_flops=backward * pairs, masked_attention_flops=backward * masked),
    )


def _mlp(architecture: Architecture, edge: Edge) -> PassCounts:
    size = architecture.intermediate_size // edge.parallel.tensor_parallel_size
    return joined(
        (
            edge.entered(),
            linear(edge.tokens, edge.width, 2 * size),  # gate and up
            linear(edge.tokens, size, edge.width),
            edge.left(),
        )
    )
