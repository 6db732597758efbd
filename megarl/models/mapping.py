"""The types of the tables of models: the rows of the tensor table, and the kinds of parts of layers.

A row specifies which Hugging Face tensors form a Megatron parameter, and its sharding. Most consist of whole
tensors. A `TensorPart` describes the others, such as one expert of a tensor that holds all experts, or the
query rows of a projection that also holds gates.

Loading, weight sync, conversion, export and parameter counts all read these rows, so a mistake here makes
every parity test fail. Names have placeholders for global layer and expert numbers. Dimensions are letters:
    V vocabulary   H hidden   F feed-forward   Q all query heads   K all key (or value) heads
    D one head   1 one   E experts   e experts of a token   M feed-forward of an expert
    S feed-forward of the shared expert
    N query heads   G key-value heads   R query heads of a key-value head
With latent attention:
    A latent vector of queries   C latent vector of keys and values   B the same with the shared rotated key
    I the shared rotated key   U keys without positions and values of all heads   O values of all heads
With a gated delta net:
    J key heads   L value heads of a key head   T value heads   X one key   Y one value   Z all values
    W the tokens that the convolution sees
With sparse attention:
    i index queries of all heads   j one index query or key   k heads of an indexer   t keys that a query sees
With a Mamba-2 mixer:
    J groups   L heads of a group   T heads   X one state vector   Y one head   Z all heads
    W the tokens that the convolution sees
With adapters:
    r rank of an adapter

A kind (`PartKind`) is a constant next to the rows of its tensors. `megarl/models/layers.py` has the table of
all kinds, and lists the parts of each layer of a model with their matrices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from megarl.models.architecture import Architecture

SECTIONS_AXIS = "P"  # the axis of a part that consists of sections
EXPERT_AXIS = "E"  # in rows of experts, the axis from which an expert takes its own element
_AXIS = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """A slice of a Hugging Face tensor, with its axes in another order.

    Axes are letters of the table or numbers. In `dims`, parentheses contain the axes into which the view
    splits one stored axis: "E H (M 2)" is a tensor (E, H, 2M) whose last axis alternates between two things.

    Attributes:
        name: The Hugging Face name.
        dims: The axes of the view of the stored tensor. `E` is indexed by the expert in rows of experts.
        sections: The sizes of the sections that the axis `P` consists of, as products of axes: "M" or "2 D".
        order: The axes that remain, in the order of the parameter. Parentheses merge axes. None: as stored.
    """

    name: str
    dims: str
    sections: tuple[str, ...] = ()
    section: int = 0
    order: str | None = None

    @property
    def takes_expert(self) -> bool:
        """Whether the tensor has an axis of experts."""
        return EXPERT_AXIS in self.dims.replace("(", " ").replace(")", " ").split()


class Rearrangement(NamedTuple):
    """The order in which the axes of a view lie in a parameter.

    Attributes:
        order: The axes of the view in the order of the parameter. Axes of which a single element is taken
            come first.
        num_merged: For each axis of the block, the number of axes of `order` that it consists of.
    """

    order: tuple[int, ...]
    num_merged: tuple[int, ...]

    def sizes_by_axis(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return, for each axis of the block, the sizes of its axes, for a slice of the view of `shape`."""
        position = len(self.order) - sum(self.num_merged)
        sizes = []
        for count in self.num_merged:
            sizes.append(tuple(shape[axis] for axis in self.order[position : position + count]))
            position += count
        return sizes


class PartGeometry(NamedTuple):
    """A part with numbers.

    Attributes:
        shape: The shape of the stored tensor.
        view: The row-major view of the stored tensor.
        starts: The first element of the slice in each axis of the view.
        stops: The end of the slice in each axis of the view.
        rearrangement: How the axes of the view lie in the parameter.
        block: The shape of the slice in the parameter.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    rearrangement: Rearrangement
    block: tuple[int, ...]


def size_of(axes: str, sizes: Mapping[str, int]) -> int:
    """Return the product of axes such as "M", "2 D" or "1 H"."""
    return prod(int(axis) if axis.isdigit() else sizes[axis] for axis in axes.split())


def part_geometry(part: TensorPart, sizes: Mapping[str, int], expert: int | None) -> PartGeometry:
    """Return the numbers of a part.

    Args:
        expert: The number of the expert in a row of experts, otherwise None.

    Raises:
        ValueError: `order` does not consist of the axes that remain.
    """
    groups = _axes(part.dims)
    axes = [axis for group in groups for axis in group]
    bounds = [_bounds(axis, part, sizes, expert) for axis in axes]
    lengths = iter([_length(axis, part, sizes) for axis in axes])
    view_groups = [tuple(next(lengths) for _ in group) for group in groups]

    # An axis from which an expert takes one element does not exist in the parameter.
    is_taken = [axis == EXPERT_AXIS and expert is not None for axis in axes]
    merged = _remaining(groups, is_taken) if part.order is None else _axes(part.order)
    taken = [number for number, taken in enumerate(is_taken) if taken]
    free = [number for number, taken in enumerate(is_taken) if not taken]
    order = []

    for axis in (axis for group in merged for axis in group):
        number = next((number for number in free if axes[number] == axis), None)
        if number is None:
            raise ValueError(f"{part.name}: {part.dims!r} lacks axis {axis!r} of order {part.order!r}")
        free.remove(number)
        order.append(number)

    if free:
        raise ValueError(f"{part.name}: order {part.order!r} lacks axis {axes[free[0]]!r} of {part.dims!r}")

    rearrangement = Rearrangement((*taken, *order), tuple(map(len, merged)))
    extents = tuple(stop - start for start, stop in bounds)
    return PartGeometry(
        shape=tuple(map(prod, view_groups)),
        view=tuple(size for group in view_groups for size in group),
        starts=tuple(start for start, _ in bounds),
        stops=tuple(stop for _, stop in bounds),
        rearrangement=rearrangement,
        block=tuple(map(prod, rearrangement.sizes_by_axis(extents))),
    )


def _axes(dims: str) -> list[list[str]]:
    """Split "E H (M 2)" into [["E"], ["H"], ["M", "2"]]."""
    return [(inner or single).split() for inner, single in _AXIS.findall(dims)]


def _remaining(groups: list[list[str]], is_taken: list[bool]) -> list[list[str]]:
    taken = iter(is_taken)
    kept = [[axis for axis in group if not next(taken)] for group in groups]
    return [group for group in kept if group]


def _length(axis: str, part: TensorPart, sizes: Mapping[str, int]) -> int:
    if axis == SECTIONS_AXIS and part.sections:
        return sum(size_of(section, sizes) for section in part.sections)
    return size_of(axis, sizes)


def _bounds(axis: str, part: TensorPart, sizes: Mapping[str, int], expert: int | None) -> tuple[int, int]:
    if axis == EXPERT_AXIS and expert is not None:
        return expert, expert + 1

    if axis == SECTIONS_AXIS and part.sections:
        ends = [size_of(section, sizes) for section in part.sections]
        start = sum(ends[: part.section])
        return start, start + ends[part.section]

    return 0, size_of(axis, sizes)


class Cut(Enum):
    """How tensor parallelism shards a parameter (for experts: expert tensor parallelism)."""

    replicated = "replicated"
    column = "column"  # output features, dimension 0
    row = "row"  # input features, dimension 1
    qkv = "qkv"  # by query group: a group's query heads, its key head, its value head
    gated = "gated"  # gate and up are sharded separately, then stacked
    stacked = "stacked"  # tensors are sharded separately along dimension 0, then stacked; sizes may differ
    vocabulary = "vocabulary"  # dimension 0, padded with rows that belong to no token


class StagePlacement(Enum):
    """The pipeline stages that hold a parameter."""

    embedding = "embedding"  # the first
    layer = "layer"  # the one that holds the layer
    expert = "expert"  # on that stage, the ranks that hold the expert
    output = "output"  # the last


class Axes(NamedTuple):
    """The axes of `HFTensor.block` along which tensors are joined, and along which they are sharded."""

    join: int
    cut: int | None


AXES = {
    Cut.replicated: Axes(join=0, cut=None),
    Cut.column: Axes(join=0, cut=0),
    Cut.row: Axes(join=0, cut=1),
    Cut.qkv: Axes(join=1, cut=0),  # view (groups, rows of a group, ...)
    Cut.gated: Axes(join=0, cut=1),  # view (1, rows, ...)
    Cut.stacked: Axes(join=0, cut=0),
    Cut.vocabulary: Axes(join=0, cut=0),
}
# The number of axes of `HFTensor.block` that form the first dimension of the parameter, if it is not one.
_ROW_AXES = {Cut.qkv: 2, Cut.gated: 2}


def num_row_axes(cut: Cut) -> int:
    """Return how many axes of `HFTensor.block` form the first dimension of the parameter."""
    return _ROW_AXES.get(cut, 1)


def always(architecture: Architecture, layer: int | None) -> bool:
    """Return whether every layer has it: yes."""
    return True


def is_sparse(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer has experts."""
    return layer in architecture.sparse_layers


def has_mixer(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer mixes the tokens of a row."""
    return layer not in architecture.layers_without_mixer


def has_feed_forward(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer has a feed-forward or experts."""
    return layer not in architecture.layers_without_feed_forward


def is_dense(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer has a feed-forward without experts."""
    return has_feed_forward(architecture, layer) and not is_sparse(architecture, layer)


@dataclass(frozen=True, kw_only=True)
class MappingRow:
    """One Megatron parameter.

    Attributes:
        place: The pipeline stages that hold the parameter.
        cut: How the parameter is sharded.
        tensors: (Hugging Face name, dimensions), or parts of tensors, in the order in which they are joined.
            The axes of a part are those of the cut: (groups, rows, ...) for `qkv`, (1 or 2, rows, ...) for
            `gated`, and otherwise those of the parameter.
        applies: Returns whether an architecture has the parameter in the layer of that number (None outside
            the layers).
        is_copy: Whether another row already holds these tensors and is the one to gather from.
        dtype: The dtype that the parameter has whatever the dtype of the model, such as float32. None: the
            dtype of the model. In a folder, its tensors may have another dtype.
        trains: Whether gradients update the parameter. A frozen one has neither gradient nor optimizer state.
        alternative: The parameter in folders that store it in other tensors. Such folders are read; megarl
            writes `tensors`.
    """

    megatron: str
    place: StagePlacement
    cut: Cut
    tensors: tuple[tuple[str, str] | TensorPart, ...]
    applies: Callable[[Architecture, int | None], bool] = always
    is_copy: bool = False
    dtype: Literal["float32"] | None = None
    trains: bool = True
    alternative: tuple[tuple[str, str] | TensorPart, ...] = ()


EMBEDDING = "embedding.word_embeddings.weight"
HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."
EXPERT = "mlp.experts.local_experts.{expert}."  # the prefix of one expert's parameters in a layer
_OF_LAYER = re.compile(HF_LAYER.replace(".", r"\.").format(layer=r"(\d+)"))


def layer_of(name: str) -> int | None:
    """Return the number of the layer of a Hugging Face tensor, None if it is in no layer."""
    found = _OF_LAYER.match(name)
    return None if found is None else int(found[1])


# How the names of the parameters of the two parts of a layer begin in the tensor table.
MIXER = "self_attention."
FEED_FORWARD = "mlp."
INDEXER = f"{MIXER}core_attention.indexer."  # within a mixer
# Towers are no part of a layer: the first pipeline stage runs them before the layers.
TOWER = "visual."
# The norms before the two parts.
NORM_BEFORE = {MIXER: "input_layernorm.weight", FEED_FORWARD: "pre_mlp_layernorm.weight"}


@dataclass(frozen=True, kw_only=True, eq=False)
class PartKind:
    """A kind of layer part, such as attention, gated delta nets or experts.

    Attributes:
        name: The name in error messages.
        prefix: How the names of its parameters in the tensor table begin, without the number of the layer.
        applies: Returns whether the layer of that number has such a part. Of the kinds with the same prefix,
            the first one in the table that applies counts.
        of_pair: The multiply-adds for each pair of a query and a key that it sees.
        most_keys: The most keys that a query sees, if it selects them; 0: no selection.
        of_every_pair: The multiply-adds for each pair of a query and a key that it may select.
        replaces_core: Whether megarl's own core of attention replaces that of Megatron's layers. It has
            16-bit kernels only, and a copy of the keys for each piece of a sequence.
        recurrence: The multiply-adds of a recurrence. Its backward pass has twice as many.
        summed: The parameters of norms whose gradients tensor-parallel ranks sum, because each has those of
            its own heads.
        gathered: The numbers that sequence-parallel ranks gather besides the inputs of matrices.
        splits_heads: Whether context-parallel ranks exchange their tokens for heads.
        cached: The numbers that an engine keeps of a token, on all ranks together.
        cached_at_least: The numbers of a token that every rank of an engine keeps, however many there are.
        cached_apart: Further numbers of a token that every rank of an engine keeps.
        state: The float32 numbers that an engine keeps of a row.
        routes_tokens: Whether tokens are sent to the ranks that have their experts.
        reads_images: Whether it turns images into tokens.
        has_groups: Whether groups of an engine's ranks can each compute it for sequences of their own
            (SGLang's `attn_dp_size`). The ranks of a group then share it like those of an engine.
        shared_out: The fields of `config.json`, with their letters, that tensor-parallel ranks share, such
            as a number of heads. With `splits_heads`, context-parallel ranks share them too.
        replicable: Further such fields, of which the ranks of an engine have copies if there are fewer than
            ranks.
        has_fp8_engine: Whether SGLang has its matrices in block-scaled FP8.
        fp8_blocks: Yields the tensor, the dimension and the size of what must consist of whole blocks on a
            rank of an engine in FP8. Takes the sizes of letters, the ranks, and those that share an expert.
        cpu_engine_lacks: What SGLang cannot compute on a CPU, in words; empty if it computes everything.
        serves_adapters: Whether SGLang applies adapters of its matrices.
        megatron_arguments: Returns the arguments of Megatron's command line that describe its sizes.
        marks_layers: Whether Megatron is told which layers have it even if all layers have.
        kernels: The packages without which it is a loop of small kernels on a GPU, by the modules that they
            install.
        stored_norm: The name in Megatron's checkpoints of the norm before it, which Transformer Engine has in
            the linear layer that follows.
    """

    name: str
    prefix: str
    applies: Callable[[Architecture, int | None], bool] = always
    of_pair: tuple[str, ...] = ()
    most_keys: str = "0"
    of_every_pair: tuple[str, ...] = ()
    replaces_core: bool = False
    recurrence: str = "0"
    summed: str = ""
    gathered: str = ""
    splits_heads: bool = False
    cached: str = "0"
    cached_at_least: str = "0"
    cached_apart: str = "0"
    state: str = "0"
    routes_tokens: bool = False
    reads_images: bool = False
    has_groups: bool = False
    shared_out: tuple[tuple[str, str], ...] = ()
    replicable: tuple[tuple[str, str], ...] = ()
    has_fp8_engine: bool = True
    fp8_blocks: Callable[[Mapping[str, int], int, float], Iterator[tuple[str, str, float]]] | None = None
    cpu_engine_lacks: str = ""
    serves_adapters: bool = True
    megatron_arguments: Callable[[Architecture], dict[str, Any]] | None = None
    marks_layers: bool = False
    kernels: Mapping[str, str] = MappingProxyType({})
    stored_norm: str = ""
