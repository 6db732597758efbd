"""Where an engine's model keeps the elements of each Hugging Face tensor, learnt from the model's own `load_weights`.

The model is given tensors without data ("meta" tensors) and every copy out of them is noted instead of made: from which
rectangle of the tensor, into which view of which parameter. With this plan a rank says what it needs of each tensor, boxes of any
size are copied straight to where they belong, and the model is read back in Hugging Face's terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.weights.checksum import checksum
from megarl.weights.tensors import Manifest, Rectangle, TensorMeta, WeightTransferError, flat_index, row_major_strides


class Destination(NamedTuple):
    """`elements`, a view of a parameter in the shape of `rectangle`, holds that rectangle of the Hugging Face tensor."""

    rectangle: Rectangle
    elements: torch.Tensor


@dataclass(frozen=True)
class TensorPlan:
    """One Hugging Face tensor, as far as this rank holds it."""

    meta: TensorMeta
    parts: tuple[Destination, ...]

    def places(self, box: Rectangle) -> Iterator[torch.Tensor]:
        """The views that are to become `box`, which lies in one of the parts."""
        for rectangle, elements in self.parts:
            if box.intersect(rectangle) == box:
                yield elements[box.relative_to(rectangle.starts).slices]

    def checksums(self) -> list[tuple[Rectangle, int]]:
        """What each rectangle adds to the checksum of the whole tensor, in the manifest's dtype."""
        strides = row_major_strides(self.meta.shape)
        return [
            (rectangle, checksum(elements.to(self.meta.dtype), flat_index(rectangle.starts, strides), strides))
            for rectangle, elements in self.parts
        ]


class ParameterPlace(NamedTuple):
    """Where a parameter lies. A plan's views keep the storages that they are of, so that no other can come to the same address."""

    storage: int  # address in memory
    address: int
    shape: torch.Size
    stride: tuple[int, ...]


class Plan(NamedTuple):
    """`tensors`: by Hugging Face name. `not_followed`: of tensors whose loader does more than to copy, in words; they have no plan.
    `unreached`: parameters into which nothing goes on this rank. `places`: where the model's parameters were."""

    tensors: dict[str, TensorPlan]
    not_followed: dict[str, str]
    unreached: list[str]
    places: list[ParameterPlace]

    @property
    def destinations(self) -> Iterator[Destination]:
        return (destination for tensor in self.tensors.values() for destination in tensor.parts)

    @property
    def manifest(self) -> Manifest:
        """Of the tensors that have a plan."""
        return {name: tensor.meta for name, tensor in self.tensors.items()}

    @property
    def boxes(self) -> dict[str, list[Rectangle]]:
        """What of each tensor is on this rank; what is there twice, as tied weights may be, counts once."""
        return {name: list(dict.fromkeys(part.rectangle for part in tensor.parts)) for name, tensor in self.tensors.items()}

    def is_of(self, model: Any) -> bool:
        """Whether the model's parameters are where they were, and the plan's views with them."""
        storages = {place.storage for place in self.places}
        return self.places == _places(model) and all(_storage(destination.elements) in storages for destination in self.destinations)


def record_plan(model: Any, manifest: Manifest) -> Plan:
    """Asks `model.load_weights` about every tensor of the manifest; the weights are not changed.

    Raises WeightTransferError with the model's own words about a tensor that it refuses.
    """
    plan = Plan({}, {}, [], _places(model))
    for name, meta in manifest.items():
        try:
            plan.tensors[name] = TensorPlan(meta, _destinations(model, name, meta))
        except (_NotFollowedError, NotImplementedError) as error:  # the second: torch, about data that a meta tensor lacks
            plan.not_followed[name] = str(error)
    reached = {_storage(destination.elements) for destination in plan.destinations}
    named = model.named_parameters()
    plan.unreached.extend(name for name, parameter in named if parameter.numel() and _storage(parameter) not in reached)
    return plan


def zero_what_is_not_written(model: Any, plan: Plan) -> None:
    """The engine pads some parameters, and starts with random numbers in them: what no tensor fills must not count."""
    if plan.not_followed:
        return  # SGLang's own loader is to fill all of it
    written: dict[int, int] = {}
    for destination in plan.destinations:
        key = _storage(destination.elements)
        written[key] = written.get(key, 0) + destination.rectangle.volume
    for parameter in model.parameters():
        if written.get(_storage(parameter), 0) < parameter.numel():
            parameter.detach().zero_()


def _destinations(model: Any, name: str, meta: TensorMeta) -> tuple[Destination, ...]:
    try:
        with torch.no_grad(), _Recorder() as recorder:
            model.load_weights([(name, torch.empty(meta.shape, dtype=meta.dtype, device="meta"))])
    except (AssertionError, ValueError, KeyError, IndexError, RuntimeError) as error:
        if isinstance(error, (_NotFollowedError, NotImplementedError)):
            raise
        raise WeightTransferError(f"the engine's model refuses {name} of shape {meta.shape}: {type(error).__name__} {error}") from error
    return tuple(_destination(meta.shape, source, target) for source, target in recorder.copies if target.numel())


def _destination(shape: Sequence[int], source: torch.Tensor, target: torch.Tensor) -> Destination:
    """`source` is a view of the meta tensor of `shape`: which rectangle is it, and how do its dimensions lie in `target`?"""
    strides = row_major_strides(shape)
    position, starts = source.storage_offset(), []
    for stride in strides:
        starts.append(position // stride)
        position %= stride
    sizes, target_dims = [1] * len(shape), {}
    for dim, (size, stride) in enumerate(zip(source.shape, source.stride(), strict=True)):
        if size == 1:
            continue
        place = next((place for place in range(len(shape)) if strides[place] == stride and shape[place] > 1), None)
        if place is None or place in target_dims or starts[place] + size > shape[place]:
            raise _NotFollowedError(
                f"of shape {tuple(shape)} it copies what is no rectangle: shape {tuple(source.shape)}, strides {source.stride()}, "
                f"offset {source.storage_offset()}"
            )
        sizes[place], target_dims[place] = size, dim
    target_strides = [target.stride(target_dims[place]) if place in target_dims else 1 for place in range(len(shape))]
    elements = target.as_strided(sizes, target_strides, target.storage_offset())
    return Destination(Rectangle(tuple(starts), tuple(map(int.__add__, starts, sizes))), elements)


def _places(model: Any) -> list[ParameterPlace]:
    return [ParameterPlace(_storage(each), each.data_ptr(), each.shape, each.stride()) for each in model.parameters()]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _NotFollowedError(RuntimeError):
    pass


class _Recorder(TorchDispatchMode):
    """Notes copies out of meta tensors; views of them may be taken, anything else cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # source, target

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self.copies.append((args[1].expand(args[0].shape), args[0]))
            return args[0]
        if not function.is_view and any(isinstance(argument, torch.Tensor) and argument.is_meta for argument in _flattened(args)):
            raise _NotFollowedError(f"it calls {function}")
        return function(*args, **(kwargs or {}))


def _flattened(args: Sequence[Any]) -> list[Any]:
    return [item for argument in args for item in (argument if isinstance(argument, (list, tuple)) else [argument])]
