"""Describe where a model's parameters, and its optimizer's parts of them, lie in the tensors of a checkpoint.

Names and offsets are Megatron's (`sharded_state_dict`) and refer to the whole model, whatever the layout. A
parameter is one slice of such a tensor, or two (a gated MLP). What the distributed optimizer holds is a range
of a parameter's elements, and so a few slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megarl.engine.groups import ParallelGroups
from megarl.engine.model import ModelChunk
from megarl.engine.optimizer import OptimizerSlice
from megarl.weights.shard_layout import held_weights, layouts_of, pieces
from megarl.weights.tensors import TensorSlice


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Elements of `tensor` that form a slice of a tensor in a checkpoint.

    Attributes:
        key: The name of the checkpoint tensor.
        shape: The shape of the whole checkpoint tensor.
        place: The slice of the checkpoint tensor.
        tensor: The tensor that contains the elements.
        start: The first element in the memory order of `tensor`.
        is_main: Whether this rank writes the elements, among the ranks that hold them. For whole parameters,
            ranks that differ only in their data-parallel position are not distinguished.
        is_padded: Whether rows at the end may only pad the vocabulary.
    """

    key: str
    shape: tuple[int, ...]
    place: TensorSlice
    tensor: Tensor
    start: int
    is_main: bool
    is_padded: bool

    @property
    def view(self) -> Tensor:
        """The elements in the shape of `place`. They must be in memory."""
        return (
            self.tensor.detach().view(-1)[self.start : self.start + self.place.volume].view(self.place.shape)
        )

    def part(self, start: int, stop: int, key: str, tensor: Tensor) -> Iterator[Shard]:
        """Yield the elements start..stop of the parameter that are in this shard.

        Args:
            start: The first element.
            stop: The end of the elements.
            key: The name of the checkpoint tensor.
            tensor: (stop - start,) the tensor in which the elements lie.
        """
        first = max(start, self.start)
        last = min(stop, self.start + self.place.volume)
        if first >= last:
            return
        position = first - start

        # A range is a few slices, each of which begins in memory where the previous one ended.
        for tensor_slice in slices_of_range(self.place.shape, first - self.start, last - self.start):
            place = tensor_slice.relative_to((0,) * len(self.shape), self.place.starts)
            yield replace(self, key=key, place=place, tensor=tensor, start=position)
            position += place.volume


def slices_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[TensorSlice]:
    """Yield the elements start..stop of a row-major tensor in order.

    There are at most three slices per dimension: a part of a row, whole rows, and a part of a row.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield TensorSlice((start,), (stop,))
        return

    row_volume = prod(shape[1:])

    # The whole rows in the range.
    first = -(-start // row_volume)
    last = stop // row_volume

    if first > last:  # the range lies within one row
        yield from _of_row(shape, last, start, stop)
        return

    yield from _of_row(shape, first - 1, start, first * row_volume)
    if first < last:
        yield TensorSlice((first, *(0 for _ in shape[1:])), (last, *shape[1:]))
    yield from _of_row(shape, last, last * row_volume, stop)


def _of_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[TensorSlice]:
    before = row * prod(shape[1:])
    for tensor_slice in slices_of_range(shape[1:], start - before, stop - before):
        yield TensorSlice((row, *tensor_slice.starts), (row + 1, *tensor_slice.stops))


class Sharding(NamedTuple):
    """The shards of one rank.

    Attributes:
        parameters: The shards of each parameter; of a model with adapters, only of those that train.
        objects: What Megatron stores in addition to tensors, also for layers that have none.
        is_first_copy: Whether this is the first of the ranks that hold the same parameters.
    """

    parameters: dict[torch.nn.Parameter, list[Shard]]
    objects: list[ShardedObject]
    is_first_copy: bool

    def of_optimizer(self, slices: Sequence[OptimizerSlice]) -> Iterator[Shard]:
        """Yield moments and float32 masters, with the keys of Megatron's `fully_reshardable` format."""
        for part in slices:
            for shard in self.parameters[part.parameter]:
                for name, tensor in part.tensors.items():
                    yield from shard.part(
                        part.start, part.stop, f"optimizer.state.{name}.{shard.key}", tensor
                    )

    def of_weights(self, slices: Sequence[OptimizerSlice]) -> Iterator[Shard]:
        """Yield each parameter once over all ranks.

        Each data-parallel rank has the elements that its optimizer updates, so that all ranks write equally
        much. Elements that no optimizer updates belong to the first rank.
        """
        # No optimizer slice covers frozen parameters, so one rank writes all of them.
        if self.is_first_copy:
            yield from (
                shard
                for parameter, shards in self.parameters.items()
                if not parameter.requires_grad
                for shard in shards
            )
        for part in slices:
            flat = part.parameter.detach().view(-1)
            for shard in self.parameters[part.parameter]:
                for piece in shard.part(part.start, part.stop, shard.key, flat):
                    yield replace(piece, tensor=part.parameter, start=piece.start + part.start)


def sharding_of(models: Sequence[ModelChunk], groups: ParallelGroups) -> Sharding:
    """Describe the shards of a rank's models."""
    parameters: dict[torch.nn.Parameter, list[Shard]] = {}
    objects: list[ShardedObject] = []

    for model in models:
        if model.architecture.lora is not None:
            parameters |= _trained_shards(model, groups)
            continue
        for entry in model.sharded_state_dict(metadata={"dp_cp_group": groups.data_context}).values():
            if isinstance(entry, ShardedObject):
                objects.append(entry)
            else:
                assert isinstance(entry.data, torch.nn.Parameter)
                parameters[entry.data] = list(_shards(entry, entry.data))

    return Sharding(parameters, objects, is_first_copy=groups.data_rank == groups.context_rank == 0)


def _trained_shards(model: ModelChunk, groups: ParallelGroups) -> dict[torch.nn.Parameter, list[Shard]]:
    """Return the shards of everything that trains in a model with adapters, as whole tensors of their own.

    Megatron would describe the adapters of a linear layer as replicated, whatever the layer shards.
    """
    architecture = model.architecture
    layout = layouts_of(architecture, groups.parallel)[groups.rank]
    weights = {weight.megatron_name: weight for weight in held_weights(architecture, layout, model.head)}
    found = {}

    for name, parameter in model.canonical_parameters():
        weight = weights[name]
        if not weight.trains:
            continue
        # A rank may have nothing but the padding of a vocabulary, which is zero and not stored.
        found[parameter] = [
            Shard(
                key=name,
                shape=weight.tensors[0].shape,
                place=piece.hf,
                tensor=parameter,
                start=0,
                is_main=piece.is_source,
                is_padded=False,
            )
            for piece in pieces(weight, layout)
        ]

    return found


def _shards(entry: ShardedTensor | ShardedTensorFactory, parameter: torch.nn.Parameter) -> Iterator[Shard]:
    """Yield the shards of a parameter.

    Megatron shards a tensor without memory like the parameter, whose own memory may be offloaded.
    """
    assert parameter.is_contiguous()
    outline = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    whole = isinstance(entry, ShardedTensor)

    # A factory splits a parameter into several checkpoint tensors, as for a gated MLP.
    cuts: Iterable[Any] = (
        [replace(entry, data=outline)]
        if whole
        else entry.build_fn(entry.key, outline, entry.replica_id, None)
    )

    for cut in cuts:
        assert cut.data is not None
        assert cut.data.is_contiguous()
        yield Shard(
            key=cut.key,
            shape=tuple(cut.global_shape),
            # Megatron prepends axes, such as the layer axis, along which a shard has length 1.
            place=TensorSlice.whole((1,) * cut.prepend_axis_num + tuple(cut.local_shape)).relative_to(
                (0,) * len(cut.global_shape), cut.global_offset
            ),
            tensor=parameter,
            start=int(cut.data.storage_offset()),
            is_main=not any(cut.replica_id[:2]),
            is_padded=cut.allow_shape_mismatch,
        )
