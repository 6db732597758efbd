"""The table of layer kinds, and the parts of each layer of a model with their matrices.

Matrices are derived from the tensor table. FLOPs, step time, memory and rules sum over the parts of layers
and ask each for what it needs, so a kind of layer states each of its shapes once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megarl.models.adapters import ADAPTER, module_of
from megarl.models.architecture import Architecture
from megarl.models.delta_net import DELTA_NET
from megarl.models.experts import EXPERTS
from megarl.models.latent import LATENT_ATTENTION
from megarl.models.mamba import MAMBA
from megarl.models.mapping import (
    EMBEDDING,
    FEED_FORWARD,
    INDEXER,
    MEGATRON_LAYER,
    MIXER,
    TOWER,
    Cut,
    MappingRow,
    PartKind,
    StagePlacement,
    has_feed_forward,
    has_mixer,
    num_row_axes,
    size_of,
)
from megarl.models.sparse_attention import REUSED_SELECTION, SPARSE_ATTENTION
from megarl.models.tensor_table import block_of, dimension_sizes, entry_size, name_of, rows_of
from megarl.models.trunk import ATTENTION, MLP, SINK_ATTENTION, WINDOWED_ATTENTION

VISION = PartKind(
    name="a vision tower",
    prefix=TOWER,
    applies=lambda architecture, layer: architecture.vision is not None,
    reads_images=True,
    has_fp8_engine=False,
)
KINDS = (
    *(VISION, DELTA_NET, MAMBA, SPARSE_ATTENTION, REUSED_SELECTION, LATENT_ATTENTION),
    *(SINK_ATTENTION, WINDOWED_ATTENTION, ATTENTION),
    *(MLP, EXPERTS),
)


class Matrix(NamedTuple):
    """A matrix that multiplies the tokens of a layer.

    Attributes:
        name: Its name in the tensor table, without the number of the layer.
        outputs: The numbers that it computes, on all ranks.
        inputs: The numbers that each of them is computed from, on all ranks.
        cut: How it is sharded.
        num_experts: The number of experts that have one each; 0 if it is no expert's.
        num_met: The number of them that multiply a token.
        is_depthwise: Whether it is a convolution, each channel of which has weights of its own.
        trains: Whether gradients update it.
        adapters: The outputs of each of its adapters, on all ranks.
        rank: The rank of its adapters.
        modules: The Hugging Face modules that it consists of.
    """

    name: str
    outputs: int
    inputs: int
    cut: Cut
    num_experts: int
    num_met: int
    is_depthwise: bool
    trains: bool
    adapters: tuple[int, ...]
    rank: int
    modules: tuple[str, ...]

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer of Megatron, unlike routers, gates of experts and convolutions."""
        is_named_so = "linear_" in self.name or self.name.endswith("_proj.weight")
        return is_named_so and not self.selects

    @property
    def selects(self) -> bool:
        """Whether it belongs to an indexer, which sees all tokens on every rank, and passes no gradient."""
        return self.name.startswith(INDEXER)

    def shards(self, tensor: int, expert_tensor: int) -> tuple[int, int]:
        """Return the numbers of ranks that share its outputs, and its inputs.

        Args:
            tensor: The number of tensor-parallel ranks.
            expert_tensor: The number of ranks that share each expert.
        """
        ranks = expert_tensor if self.num_experts else tensor
        return ranks if self.cut not in (Cut.replicated, Cut.row) else 1, ranks if self.cut is Cut.row else 1

    def on_rank(self, tensor: int, expert_tensor: int) -> Matrix:
        """Return the part of it on one of the ranks that share it. The arguments are those of `shards`."""
        of_outputs, of_inputs = self.shards(tensor, expert_tensor)
        return self._replace(
            outputs=self.outputs // of_outputs,
            inputs=self.inputs // of_inputs,
            adapters=tuple(each // of_outputs for each in self.adapters),
        )


class LayerPart(NamedTuple):
    """A part of a layer, with a residual connection around it. Most layers have a mixer and a feed-forward.

    Attributes:
        window: The number of tokens that a token sees; 0 means all.
        has_predictors_only: Whether only tokens that predict another one are left, which is so after the last
            mixer of a model whose layers route no tokens.
    """

    kind: PartKind
    matrices: tuple[Matrix, ...]
    window: int
    has_predictors_only: bool


@lru_cache(maxsize=64)
def layers_of(architecture: Architecture) -> tuple[tuple[LayerPart, ...], ...]:
    """Return the parts of each layer of a model, in the order of the forward pass."""
    matrices = list(_matrices(architecture))
    sizes = dimension_sizes(architecture)
    is_dense = not routes_tokens(architecture)
    windows = architecture.windows or (0,) * architecture.num_hidden_layers
    layers = []

    for layer, window in enumerate(windows):
        held = [matrix for row, matrix in matrices if row.applies(architecture, layer)]
        parts = []
        for prefix in (MIXER, FEED_FORWARD):
            kind = _kind_at(architecture, layer, prefix)
            if kind is not None:
                of_part = tuple(matrix for matrix in held if matrix.name.startswith(prefix))
                is_last = is_dense and prefix == FEED_FORWARD and layer == architecture.num_hidden_layers - 1
                seen = size_of(kind.most_keys, sizes) or window * bool(kind.of_pair)
                parts.append(LayerPart(kind, of_part, seen, is_last))
        layers.append(tuple(parts))

    return tuple(layers)


def _kind_at(architecture: Architecture, layer: int, prefix: str) -> PartKind | None:
    """Return the kind of a part of a layer. No size is read: rules ask also about impossible sizes."""
    if not (has_mixer if prefix == MIXER else has_feed_forward)(architecture, layer):
        return None
    kinds = (kind for kind in KINDS if kind.prefix == prefix and kind.applies(architecture, layer))
    return next(kinds, None)


@lru_cache(maxsize=64)
def kinds_of(architecture: Architecture) -> tuple[PartKind, ...]:
    """Return the kinds of the parts of a model, in the order of the table."""
    layers = range(architecture.num_hidden_layers)
    found = {_kind_at(architecture, layer, prefix) for layer in layers for prefix in (MIXER, FEED_FORWARD)}
    found |= {kind for kind in KINDS if kind.prefix == TOWER and kind.applies(architecture, None)}
    return tuple(kind for kind in KINDS if kind in found)


def kind_of(architecture: Architecture, layer: int, prefix: str) -> PartKind:
    """Return the kind of the part of a layer whose parameters begin with `prefix`, which it must have."""
    kind = _kind_at(architecture, layer, prefix)
    assert kind is not None, (architecture.model_type, layer, prefix)
    return kind


def window_of(architecture: Architecture, layer: int) -> int:
    """Return the number of tokens that a token sees in a layer; 0 means all."""
    return max(part.window for part in layers_of(architecture)[layer])


def stores_layers_apart(architecture: Architecture) -> bool:
    """Return whether layers have different parameters, so that Megatron stores each layer separately."""
    every = {tuple(part.kind for part in layer) for layer in layers_of(architecture)}
    return len(every) > 1 or any(kind.marks_layers for kind in kinds_of(architecture))


def replaces_core(architecture: Architecture) -> bool:
    """Return whether megarl's own core of attention replaces that of Megatron's layers."""
    return any(kind.replaces_core for kind in kinds_of(architecture))


def reads_images(architecture: Architecture) -> bool:
    """Return whether the model turns images into tokens."""
    return any(kind.reads_images for kind in kinds_of(architecture))


def is_of_group(parameter: str) -> bool:
    """Return whether each group of an engine's ranks has a Megatron parameter of its own, all of it.

    It is one of attention, or the input embedding, whose outputs attention reads.
    """
    return parameter == EMBEDDING or any(kind.has_groups and kind.prefix in parameter for kind in KINDS)


def has_dense_layers(architecture: Architecture) -> bool:
    """Return whether some layers have a feed-forward that sees every token."""
    feed_forwards = (kind for kind in kinds_of(architecture) if kind.prefix == FEED_FORWARD)
    return any(not kind.routes_tokens for kind in feed_forwards)


def routing_layers(architecture: Architecture) -> tuple[int, ...]:
    """Return the numbers of the layers that send tokens to the ranks that have their experts."""
    layers = range(architecture.num_hidden_layers)
    return tuple(layer for layer in layers if num_routing_layers(architecture, (layer,)))


def num_routing_layers(architecture: Architecture, layers: Iterable[int]) -> int:
    """Return how many of the layers send tokens to the ranks that have their experts."""
    kinds = [kind for kind in KINDS if kind.routes_tokens]
    return sum(kind.applies(architecture, layer) for kind in kinds for layer in layers)


@lru_cache(maxsize=64)
def routes_tokens(architecture: Architecture) -> bool:
    """Return whether some layers send tokens to the ranks that have their experts."""
    return num_routing_layers(architecture, range(architecture.num_hidden_layers)) > 0


@lru_cache(maxsize=64)
def token_products(architecture: Architecture) -> int:
    """Return the multiply-adds of one token in all layers, without those of pairs of tokens."""
    sizes = dimension_sizes(architecture)
    return sum(
        size_of(part.kind.recurrence, sizes)
        + sum(matrix.outputs * matrix.inputs * matrix.num_met for matrix in part.matrices)
        for layer in layers_of(architecture)
        for part in layer
    )


@lru_cache(maxsize=64)
def selection_products(architecture: Architecture) -> tuple[int, int]:
    """Return the multiply-adds of the indexers of all layers, for one token and for each pair of tokens."""
    sizes = dimension_sizes(architecture)
    parts = [part for layer in layers_of(architecture) for part in layer]
    matrices = [matrix for part in parts for matrix in part.matrices if matrix.selects]
    return (
        sum(matrix.outputs * matrix.inputs for matrix in matrices),
        sum(size_of(each, sizes) for part in parts for each in part.kind.of_every_pair),
    )


@lru_cache(maxsize=64)
def pair_products(architecture: Architecture) -> Mapping[int, int]:
    """Return the multiply-adds for each pair of tokens that a mask leaves, in all layers of each window."""
    sizes = dimension_sizes(architecture)
    products = Counter[int]()
    for part in (part for layer in layers_of(architecture) for part in layer):
        products[part.window] += sum(size_of(each, sizes) for each in part.kind.of_pair)
        products[0] += sum(size_of(each, sizes) for each in part.kind.of_every_pair)
    return products


def cached_numbers(architecture: Architecture, layers: Iterable[int], ranks: int) -> int:
    """Return the numbers that one of the ranks of an engine keeps of a token, in these layers."""
    sizes = dimension_sizes(architecture)
    kinds = (part.kind for layer in layers for part in layers_of(architecture)[layer])
    return sum(
        max(size_of(kind.cached, sizes) // ranks, size_of(kind.cached_at_least, sizes))
        + size_of(kind.cached_apart, sizes)
        for kind in kinds
    )


def state_bytes(architecture: Architecture, element: int) -> int:
    """Return the bytes that an engine keeps of a row whatever its length, on all ranks.

    SGLang has states in float32, and the last inputs of convolutions in the dtype of the model.

    Args:
        element: The bytes of a number in that dtype.
    """
    sizes = dimension_sizes(architecture)
    found = 0
    for part in (part for layer in layers_of(architecture) for part in layer):
        found += 4 * size_of(part.kind.state, sizes)
        convolutions = (matrix for matrix in part.matrices if matrix.is_depthwise)
        found += sum(matrix.outputs * (matrix.inputs - 1) for matrix in convolutions) * element
    return found


@lru_cache(maxsize=64)
def linears_of(architecture: Architecture) -> tuple[Matrix, ...]:
    """Return the linear layers of a model, without repetitions of the same one in several layers."""
    parts = dict.fromkeys(part for layer in layers_of(architecture) for part in layer)
    return tuple(dict.fromkeys(each for part in parts for each in part.matrices if each.is_linear))


def _matrices(architecture: Architecture) -> Iterator[tuple[MappingRow, Matrix]]:
    """Yield the matrices of all layers of a model, each with its row."""
    sizes = dimension_sizes(architecture)
    rows = [row for row in rows_of(architecture, "lm") if row.megatron.startswith(MEGATRON_LAYER)]

    # B of each adapter has the outputs of its projection.
    adapters = defaultdict[str, list[int]](list)
    for row in rows:
        linear, is_adapter, which = row.megatron.partition(ADAPTER)
        if is_adapter and which.endswith(".b"):
            adapters[linear].append(entry_size(row.tensors[0], sizes, row.place) // sizes["r"])

    for row in rows:
        axes = num_row_axes(row.cut)
        blocks = [block_of(entry, row, architecture) for entry in row.tensors]
        is_of_expert = row.place is StagePlacement.expert

        # Vectors, such as norms and biases, have no inputs.
        if ADAPTER not in row.megatron and (inputs := blocks[0][axes:]):
            yield (
                row,
                Matrix(
                    name=row.megatron.removeprefix(MEGATRON_LAYER),
                    outputs=sum(prod(block[:axes]) for block in blocks),
                    inputs=prod(inputs),
                    cut=row.cut,
                    num_experts=sizes["E"] if is_of_expert else 0,
                    num_met=sizes["e"] if is_of_expert else 1,
                    is_depthwise=len(inputs) > 1,
                    trains=row.trains,
                    adapters=tuple(adapters[row.megatron.removesuffix(".weight")]),
                    rank=sizes["r"],
                    modules=tuple(dict.fromkeys(module_of(name_of(entry)) for entry in row.tensors)),
                ),
            )
