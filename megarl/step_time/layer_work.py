"""Forward and backward passes of a transformer layer on one rank, by the kinds of its parts. Pure."""

from __future__ import annotations

from typing import NamedTuple

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.step_time.attention_work import core, delta_net_work, projections
from megarl.step_time.expert_work import expert_work
from megarl.step_time.linears import linears_of, mlp_work
from megarl.step_time.packed_batch import PackedBatch
from megarl.step_time.work import IDLE, Edge, PassCounts


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
