"""Plan which slices of which Hugging Face tensors the shard of each rank contains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from megarl.config.schema import ParallelConfig
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size
from megarl.models.layers import routes_tokens
from megarl.models.mapping import AXES, Cut, PartGeometry, StagePlacement, num_row_axes
from megarl.models.tensor_table import Head, Weight, hf_tensors, weights_of
from megarl.weights.piece import Piece, rearranged_slices
from megarl.weights.tensors import TensorSlice, WeightTransferError, chunks_fault, tiling_fault


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The layout of one rank. All virtual stages of the rank share it, so `layers` may have gaps.

    Attributes:
        tensor_parallel_size: The size of the tensor-parallel group.
        tensor_parallel_rank: The rank in the tensor-parallel group.
        layers: Global numbers of the layers held.
        holds_embedding: Whether the rank is on the first pipeline stage.
        holds_output: Whether the rank is on the last pipeline stage.
        padded_vocab_size: Rows of the embedding over all tensor-parallel ranks together.
        experts: Global numbers of the experts held, the same for every sparse layer in `layers`.
        expert_tensor_parallel_size: The number of ranks that each expert is sharded over.
        expert_tensor_parallel_rank: The rank among them.

    Raises:
        ValueError: A rank is outside its group, or the padded vocabulary does not divide.
    """

    tensor_parallel_size: int
    tensor_parallel_rank: int
    layers: tuple[int, ...]
    holds_embedding: bool
    holds_output: bool
    padded_vocab_size: int
    experts: range = range(0)
    expert_tensor_parallel_size: int = 1
    expert_tensor_parallel_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "expert_tensor_parallel"):
            size = getattr(self, f"{name}_size")
            rank = getattr(self, f"{name}_rank")
            if not 0 <= rank < size:
                raise ValueError(f"{name}_rank {rank} is outside 0..{size - 1}")
        if self.padded_vocab_size % self.tensor_parallel_size:
            raise ValueError(
                f"padded_vocab_size {self.padded_vocab_size} is not a multiple of tensor_parallel_size "
                f"{self.tensor_parallel_size}; compute it with padded_vocab_size of models/counts.py"
            )

    def cut_of(self, weight: Weight) -> tuple[int, int]:
        """Return the size and the rank of the parallelism that shards `weight`."""
        if weight.place is StagePlacement.expert:
            return self.expert_tensor_parallel_size, self.expert_tensor_parallel_rank
        return self.tensor_parallel_size, self.tensor_parallel_rank

    def holds(self, weight: Weight) -> bool:
        if weight.place is StagePlacement.layer:
            return weight.layer in self.layers
        if weight.place is StagePlacement.expert:
            return weight.layer in self.layers and weight.expert in self.experts
        if weight.place is StagePlacement.embedding:
            return self.holds_embedding

        # A tied output layer on the stage of the embedding is the embedding's own parameter.
        return self.holds_output and not (weight.is_copy and self.holds_embedding)


def model_layouts(
    architecture: Architecture,
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int = 1,
    virtual_pipeline_parallel_size: int | None = None,
    pipeline_layout: list[int] | None = None,
    padded_vocab_size: int,
) -> tuple[ShardLayout, ...]:
    """Return the layouts of all ranks of one replica, stage by stage, tensor-parallel rank fastest.

    Experts are sharded by the tensor-parallel ranks like everything else.

    Raises:
        ValueError: The layers do not divide evenly, and there is no `pipeline_layout`.
    """
    sizes = ParallelConfig(
        pipeline_parallel_size=pipeline_parallel_size,
        virtual_pipeline_parallel_size=virtual_pipeline_parallel_size,
        pipeline_layout=pipeline_layout,
    )
    num_layers = architecture.num_hidden_layers
    if pipeline_layout is None and num_layers % sizes.num_virtual_stages:
        raise ValueError(
            f"num_hidden_layers {num_layers} is not a multiple of pipeline_parallel_size "
            f"{pipeline_parallel_size} x virtual_pipeline_parallel_size {virtual_pipeline_parallel_size or 1}"
        )

    expert_cut = tensor_parallel_size if routes_tokens(architecture) else 1
    return tuple(
        ShardLayout(
            tensor_parallel_size=tensor_parallel_size,
            tensor_parallel_rank=rank,
            layers=tuple(chain.from_iterable(sizes.chunks_of_stage(num_layers, stage))),
            holds_embedding=stage == 0,
            holds_output=stage == pipeline_parallel_size - 1,
            padded_vocab_size=padded_vocab_size,
            experts=range(architecture.num_experts),
            expert_tensor_parallel_size=expert_cut,
            expert_tensor_parallel_rank=rank % expert_cut,
        )
        for stage in range(pipeline_parallel_size)
        for rank in range(tensor_parallel_size)
    )


def whole_layout(architecture: Architecture, padded_vocab_size: int | None = None) -> ShardLayout:
    """Return the layout of a rank that holds the whole model. The vocabulary is unpadded by default."""
    (layout,) = model_layouts(
        architecture, tensor_parallel_size=1, padded_vocab_size=padded_vocab_size or architecture.vocab_size
    )
    return layout


def layouts_of(architecture: Architecture, parallel: ParallelConfig) -> tuple[ShardLayout, ...]:
    """Return the layout of every rank of a role, replicas included. The vocabulary is padded.

    Experts are distributed over all ranks of a stage, across data-parallel replicas: expert-tensor-parallel
    ranks fastest, then expert-parallel ranks, then copies.
    """
    of_stages = model_layouts(
        architecture,
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_parallel_size=parallel.virtual_pipeline_parallel_size,
        pipeline_layout=parallel.pipeline_layout,
        padded_vocab_size=padded_vocab_size(architecture.vocab_size, parallel.tensor_parallel_size),
    )
    cut = parallel.expert_tensor_parallel_size
    num_parts = parallel.expert_parallel_size

    if architecture.num_experts % num_parts:
        raise ValueError(
            f"num_experts {architecture.num_experts} is not a multiple of expert_parallel_size {num_parts}"
        )

    each = architecture.num_experts // num_parts
    layouts = []

    for rank, coordinate in enumerate(map(parallel.coordinate, range(parallel.world_size))):
        # Everything except experts depends only on the stage and the tensor-parallel rank.
        dense = of_stages[coordinate.pp * parallel.tensor_parallel_size + coordinate.tp]
        # Experts are distributed over all ranks of the stage, across data-parallel replicas.
        place = rank % parallel.stage_size
        first = place // cut % num_parts * each
        layouts.append(
            replace(
                dense,
                experts=range(first, first + each),
                expert_tensor_parallel_size=cut,
                expert_tensor_parallel_rank=place % cut,
            )
        )

    return tuple(layouts)


def held_weights(architecture: Architecture, layout: ShardLayout, head: Head = "lm") -> tuple[Weight, ...]:
    """Return the parameters of one rank, in the order of the forward pass."""
    return tuple(weight for weight in weights_of(architecture, head) if layout.holds(weight))


def shard_view(weight: Weight, layout: ShardLayout) -> tuple[int, ...]:
    """Return the view of the rank's shard of `weight` in which its pieces are slices.

    Raises:
        ValueError: Tensor parallelism does not divide the sharded dimension.
    """
    axes = AXES[weight.cut]

    # The shape of the whole parameter, in which the tensors are concatenated along one axis.
    view = list(weight.tensors[0].block)
    view[axes.join] = sum(tensor.block[axes.join] for tensor in weight.tensors)
    if axes.cut is None:
        return tuple(view)

    if weight.cut is Cut.vocabulary:
        if layout.padded_vocab_size < view[0]:
            raise ValueError(
                f"padded_vocab_size {layout.padded_vocab_size} is smaller than the vocabulary of {view[0]}"
            )
        view[0] = layout.padded_vocab_size

    # Tensors that are stacked after they were sharded must divide one by one.
    (size, _) = layout.cut_of(weight)
    is_stacked = weight.cut is Cut.stacked
    lengths = [tensor.block[axes.cut] for tensor in weight.tensors] if is_stacked else [view[axes.cut]]
    for length in lengths:
        _check_division(weight, length, size)

    view[axes.cut] //= size
    return tuple(view)


def _check_division(weight: Weight, length: int, size: int) -> None:
    if length % size == 0:
        return

    name = "expert_tensor_parallel_size" if weight.place is StagePlacement.expert else "tensor_parallel_size"
    unit = "columns" if weight.cut is Cut.row else "key-value heads" if weight.cut is Cut.qkv else "rows"
    raise ValueError(
        f"{weight.megatron_name}: {length} {unit} cannot be sharded by {name} {size}; choose a size that "
        f"divides {length}"
    )


def pieces(weight: Weight, layout: ShardLayout) -> tuple[Piece, ...]:
    """Return where each Hugging Face tensor of `weight` lies in the rank's shard.

    Tensors of which the rank holds nothing are omitted.

    Raises:
        ValueError: Tensor parallelism does not divide the sharded dimension.
    """
    return tuple(piece for _, piece in numbered_pieces(weight, layout))


def numbered_pieces(weight: Weight, layout: ShardLayout) -> Iterator[tuple[int, Piece]]:
    """Yield the pieces of `weight` with their index in `weight.tensors`. See `pieces`."""
    axes = AXES[weight.cut]
    (size, rank) = layout.cut_of(weight)
    view = shard_view(weight, layout)

    # All tensor-parallel ranks hold the whole of a replicated parameter, and rank 0 is the source.
    is_source = not weight.is_copy and (axes.cut is not None or rank == 0)
    joined = 0

    for number, tensor in enumerate(weight.tensors):
        block = TensorSlice.whole(tensor.block)
        shard = TensorSlice.whole(view)
        if axes.cut is not None:
            # Every tensor is sharded like the parameter, except stacked ones, which differ in size.
            each = tensor.block[axes.cut] // size if weight.cut is Cut.stacked else view[axes.cut]
            # A padded vocabulary is longer than the tensor, so the last ranks may hold fewer rows or none.
            start, stop = (min((rank + end) * each, tensor.block[axes.cut]) for end in (0, 1))
            block = block.along(axes.cut, start, stop)
            shard = shard.along(axes.cut, 0, stop - start)
        if len(weight.tensors) > 1:
            length = block.stops[axes.join] - block.starts[axes.join]
            shard = shard.along(axes.join, joined, joined + length)
            joined += length
        if block.volume:
            hf = block if tensor.part is None else _in_part(weight, tensor.part, block)
            rearrangement = None if tensor.part is None else tensor.part.rearrangement
            yield number, Piece(tensor.name, tensor.view, hf, view, shard, is_source, rearrangement)


def _in_part(weight: Weight, part: PartGeometry, block: TensorSlice) -> TensorSlice:
    """Return the slice of the view of a part's tensor that is the slice `block` of the part."""
    whole = TensorSlice(part.starts, part.stops)
    found = [hf for _, hf in rearranged_slices(part.rearrangement, whole, block)]
    if len(found) != 1:
        raise ValueError(
            f"{weight.megatron_name}: {block} of {part.block} is not one slice of the Hugging Face tensor; "
            "choose another tensor-parallel size"
        )
    return found[0]


def padding(weight: Weight, layout: ShardLayout) -> TensorSlice | None:
    """Return the padding rows of a vocabulary shard, None if there are none."""
    if weight.cut is not Cut.vocabulary:
        return None
    view = shard_view(weight, layout)
    used = min(max(weight.tensors[0].block[0] - layout.tensor_parallel_rank * view[0], 0), view[0])
    return TensorSlice.whole(view).along(0, used, view[0]) if used < view[0] else None


def shard_shapes(
    architecture: Architecture, layout: ShardLayout, head: Head = "lm"
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter that the rank holds, by Megatron name (global layer number)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in held_weights(architecture, layout, head):
        view = shard_view(weight, layout)
        # The view may split the first dimension; the parameter itself does not.
        split = num_row_axes(weight.cut)
        shapes[weight.megatron_name] = (prod(view[:split]), *view[split:])

    return shapes


# ---- proof that ranks hold every tensor once

# Below this number, comparing all slices of a tensor is fast, and faults are described more precisely.
_FEW_SLICES = 32


def check_coverage(
    architecture: Architecture, rank_pieces: Iterable[Sequence[Piece]], head: Head = "lm"
) -> None:
    """Prove that the pieces of one replica's ranks cover every tensor exactly once, ignoring copies.

    Args:
        rank_pieces: For each rank, the pieces of all weights that it holds.

    Raises:
        WeightTransferError: A tensor is not covered exactly once; the message names the tensors.
    """
    found: dict[str, list[TensorSlice]] = defaultdict(list)
    for piece in (piece for all_of_rank in rank_pieces for piece in all_of_rank):
        if piece.is_source:
            found[piece.hf_name].append(piece.hf)

    faults = []
    for tensor in hf_tensors(architecture, head):
        slices = found.pop(tensor.name, [])
        # A tensor that holds many experts consists of many slices.
        check = tiling_fault if len(slices) <= _FEW_SLICES else chunks_fault
        if (fault := check(tensor.view, slices)) is not None:
            faults.append(f"{tensor.name}: {fault}")

    # What remains belongs to no parameter of the model.
    faults += [f"{name}: not a tensor of the model" for name in found]
    if faults:
        raise WeightTransferError(
            f"the layout does not hold {counted(len(faults), 'tensor')} exactly once: "
            + "; ".join(faults[:8])
        )


def rank_pieces(architecture: Architecture, layout: ShardLayout, head: Head = "lm") -> tuple[Piece, ...]:
    """Return all pieces of one rank."""
    return tuple(
        piece for weight in held_weights(architecture, layout, head) for piece in pieces(weight, layout)
    )
