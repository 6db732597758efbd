"""Find where an engine's model stores the elements of each Hugging Face tensor.

This uses the model's own `load_weights`.

The model is given tensors without data (on the "meta" device). Every copy from them is recorded instead of
executed: the slice of the tensor that is read and the view of the parameter that would be written. The
resulting plan contains the slices that a rank needs, copies slices of any size to their destination, and
reads the model back under Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megarl.weights.checksum import checksum
from megarl.weights.tensors import (
    Manifest,
    TensorMeta,
    TensorSlice,
    WeightTransferError,
    flat_index,
    row_major_strides,
)

# A slice of a Hugging Face tensor, and the view of a parameter, in the shape of the slice, that receives it.
Destination = tuple[TensorSlice, torch.Tensor]


@dataclass(frozen=True)
class TensorDestinations:
    """The parts of one Hugging Face tensor on this rank."""

    meta: TensorMeta
    parts: tuple[Destination, ...]

    def places(self, tensor_slice: TensorSlice) -> Iterator[torch.Tensor]:
        """Yield the views to which `tensor_slice` is copied. It must lie in one of the parts."""
        for whole, elements in self.parts:
            if tensor_slice.intersect(whole) == tensor_slice:
                yield elements[tensor_slice.relative_to(whole.starts).index]

    def checksums(self) -> list[tuple[TensorSlice, int]]:
        """Return each slice's contribution to the checksum of the whole tensor, in the manifest's dtype."""
        strides = row_major_strides(self.meta.shape)
        return [
            (
                tensor_slice,
                checksum(elements.to(self.meta.dtype), flat_index(tensor_slice.starts, strides), strides),
            )
            for tensor_slice, elements in self.parts
        ]


class DestinationPlan(NamedTuple):
    """Plan of where each tensor goes.

    Attributes:
        tensors: Destinations by Hugging Face name.
        not_followed: Reasons for tensors whose loader does more than copying; they have no plan.
        unreached: Parameters that receive nothing on this rank.
        places: Storage, offset, shape and stride of the model's parameters when the plan was recorded.
    """

    tensors: dict[str, TensorDestinations]
    not_followed: dict[str, str]
    unreached: list[str]
    places: list[tuple[int, int, torch.Size, tuple[int, ...]]]

    @property
    def destinations(self) -> Iterator[Destination]:
        return (destination for tensor in self.tensors.values() for destination in tensor.parts)

    @property
    def manifest(self) -> Manifest:
        """Manifest of the tensors that have a plan."""
        return {name: tensor.meta for name, tensor in self.tensors.items()}

    @property
    def slices(self) -> dict[str, list[TensorSlice]]:
        """Return the slices of each tensor on this rank.

        Slices stored twice, such as tied weights, count once.
        """
        return {
            name: list(dict.fromkeys(tensor_slice for tensor_slice, _ in tensor.parts))
            for name, tensor in self.tensors.items()
        }

    def is_of(self, model: Any) -> bool:
        """Return whether the model's parameters still use the memory to which this plan's views refer."""
        storages = {storage for storage, *_ in self.places}
        return self.places == _places(model) and all(
            storage_of(elements) in storages for _, elements in self.destinations
        )


def record_plan(model: Any, manifest: Manifest) -> DestinationPlan:
    """Record where `model.load_weights` would copy each tensor of the manifest, without changing the weights.

    All tensors go through one call, because a loader may build tables of all parameters and experts in each
    call. If that call fails, each tensor is tried separately to find the one at fault.

    Raises:
        WeightTransferError: The model refuses a tensor. The message names it and quotes the model's own
            error.
    """
    try:
        recorded, not_followed = _record(model, manifest)
    except _LOADER_ERRORS:
        recorded, not_followed = _record_one_by_one(model, manifest)

    plan = DestinationPlan({}, not_followed, [], _places(model))
    # Convert each recorded copy into a slice of the tensor and the view that receives it.
    for name, copies in recorded.items():
        shape = manifest[name].shape
        try:
            parts = tuple(_destination(shape, source, target) for source, target in copies if target.numel())
        except _NotFollowedError as error:
            plan.not_followed[name] = str(error)
            continue
        plan.tensors[name] = TensorDestinations(manifest[name], parts)

    # A parameter that receives nothing shows that the manifest is not that of the model.
    reached = {storage_of(elements) for _, elements in plan.destinations}
    plan.unreached.extend(
        name
        for name, parameter in model.named_parameters()
        if parameter.numel() and storage_of(parameter) not in reached and not _is_engines_own(parameter)
    )

    return plan


def zero_what_is_not_written(model: Any, plan: DestinationPlan) -> None:
    """Zero parameters with unwritten elements.

    The engine pads some parameters and initializes them randomly; elements that no tensor fills must not
    count.
    """
    if plan.not_followed:
        return  # SGLang's own loader fills all of it
    written: dict[int, int] = {}

    # Count the elements that are filled in each storage.
    for tensor_slice, elements in plan.destinations:
        key = storage_of(elements)
        written[key] = written.get(key, 0) + tensor_slice.volume

    # A parameter with padding is zeroed completely: the weights that follow fill the rest.
    for parameter in model.parameters():
        if written.get(storage_of(parameter), 0) < parameter.numel() and not _is_engines_own(parameter):
            parameter.detach().zero_()


_Copies = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]  # source and target, by tensor


def _record(model: Any, manifest: Manifest) -> tuple[_Copies, dict[str, str]]:
    """Record one call of `load_weights` with all tensors of the manifest.

    Returns the copies of each tensor that could be followed, and the reasons for the others.

    A copy belongs to the tensor whose storage it reads, so the loader may hold back tensors and copy them in
    any order.
    """
    # Copies from meta tensors can be recorded, since there is no data to copy.
    tensors = {
        name: torch.empty(meta.shape, dtype=meta.dtype, device="meta") for name, meta in manifest.items()
    }
    with torch.no_grad(), _Recorder() as recorder:
        model.load_weights(iter(tensors.items()))

    recorder.split_joined()
    names = {storage_of(tensor): name for name, tensor in tensors.items()}
    not_followed: dict[str, str] = {}

    # Copies alone do not describe a tensor that the loader computes with.
    for storage, reason in recorder.computed.items():
        if storage in names:
            not_followed[names[storage]] = reason

    copies: _Copies = {name: [] for name in manifest if name not in not_followed}
    for source, target in recorder.copies:
        name = names.get(storage_of(source))
        # Otherwise the source was computed, or is zero: such parameters are zeroed before an update.
        if name in copies and storage_of(source) not in recorder.zeroed:
            copies[name].append((source, target))

    return copies, not_followed


def _record_one_by_one(model: Any, manifest: Manifest) -> tuple[_Copies, dict[str, str]]:
    """Record one call of `load_weights` per tensor.

    Raises WeightTransferError for the first tensor that the model refuses.
    """
    copies: _Copies = {}
    not_followed: dict[str, str] = {}
    for name, meta in manifest.items():
        try:
            recorded, refused = _record(model, {name: meta})
        except (
            _NotFollowedError,
            NotImplementedError,
        ) as error:  # RuntimeError: torch, for elements that a meta tensor lacks
            not_followed[name] = str(error)
        except _LOADER_ERRORS as error:
            raise WeightTransferError(
                f"the engine's model refuses {name} of shape {meta.shape}: {type(error).__name__} {error}"
            ) from error
        else:
            copies |= recorded
            not_followed |= refused

    return copies, not_followed


def _destination(shape: Sequence[int], source: torch.Tensor, target: torch.Tensor) -> Destination:
    """Find the slice of a tensor that a copy reads, and the view that receives it.

    `source` is a view of the tensor of `shape`; the result contains a view of `target`.

    Raises _NotFollowedError if `source` is not a slice with its dimensions in any order.
    """
    strides = row_major_strides(shape)
    source = source if source.shape == target.shape else source.expand(target.shape)
    # Decompose the offset into the index of the slice's first element.
    position = int(source.storage_offset())
    starts: list[int] = []

    for stride in strides:
        starts.append(position // stride)
        position %= stride

    sizes: list[int] = [1] * len(shape)
    target_dims = {}

    # Match each dimension of the view with the tensor's dimension of the same stride.
    for dim, (size, stride) in enumerate(zip(source.shape, source.stride(), strict=True)):
        if size == 1:
            continue
        place = next(
            (place for place in range(len(shape)) if strides[place] == stride and shape[place] > 1), None
        )
        if place is None or place in target_dims or starts[place] + size > shape[place]:
            raise _NotFollowedError(
                f"of shape {tuple(shape)} it copies a part that is not a slice: shape {tuple(source.shape)}, "
                f"strides {source.stride()}, offset {source.storage_offset()}"
            )
        sizes[place] = size
        target_dims[place] = dim

    # View the target with the dimensions in the tensor's order.
    target_strides = [
        target.stride(target_dims[place]) if place in target_dims else 1 for place in range(len(shape))
    ]
    elements = target.as_strided(sizes, target_strides, target.storage_offset())
    return TensorSlice(tuple(starts), tuple(map(int.__add__, starts, sizes))), elements


def _is_engines_own(parameter: torch.Tensor) -> bool:
    """Return whether SGLang fills a parameter itself: the scales of a KV cache (see derived_tensors.py)."""
    return getattr(parameter, "_skip_weight_check", False)


def _places(model: Any) -> list[tuple[int, int, torch.Size, tuple[int, ...]]]:
    # A plan's views keep their storages alive, so no other storage can get the same identity. A storage that
    # is emptied and refilled, as an engine's sleep does on a CPU, keeps its identity.
    return [
        (storage_of(each), each.storage_offset(), each.shape, each.stride()) for each in model.parameters()
    ]


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of the tensor's storage, which views share and meta tensors have as well."""
    return tensor.untyped_storage()._cdata


class _NotFollowedError(RuntimeError):
    pass


# Exceptions that model code raises for an unexpected tensor.
_LOADER_ERRORS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class _Recorder(TorchDispatchMode):
    """Records copies from meta tensors instead of executing them.

    Views and concatenations of meta tensors are followed. `computed` maps each storage to the other function
    that first received it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # source, target
        self._joined: dict[int, _Joined] = {}  # storage -> the concatenation
        self.computed: dict[int, str] = {}  # storage -> reason
        self.zeroed: set[int] = set()  # storages of tensors that the loader replaces by zeros
        self._views: set[Any] = set()  # functions known to return views, cached because asking is slower

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Look for copies from a tensor of the manifest into a parameter.
        if func is _COPY and args[1].is_meta and not args[0].is_meta:
            self.copies.append((args[1], args[0]))
            return args[0]

        # A rank that must not add a bias a second time replaces it by zeros, so it needs none of the tensor.
        if func is _ZERO and args[0].is_meta:
            self.zeroed.add(storage_of(args[0]))
            return args[0]

        # Views are followed; any other function means that the loader computes with the tensor.
        if func not in self._views:
            if func.is_view:
                self._views.add(func)
            elif sources := [
                each for each in tree_iter(args) if isinstance(each, torch.Tensor) and each.is_meta
            ]:
                if func is _CAT and len(sources) == len(args[0]):
                    return self._join(*args, **(kwargs or {}))
                return self._compute(func, sources, args, kwargs or {})

        return func(*args, **(kwargs or {}))

    def _join(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        whole = _CAT(parts, dim)
        self._joined[storage_of(whole)] = _Joined(whole, list(parts), dim)
        return whole

    def split_joined(self) -> None:
        """Replace each copy from a concatenation by copies from its parts."""
        copies = self.copies
        self.copies = []

        for source, target in copies:
            joined = self._joined.get(storage_of(source))
            if joined is None:
                self.copies.append((source, target))
                continue
            try:
                self.copies += joined.split(source, target)
            except _NotFollowedError as error:
                for part in joined.parts:
                    self.computed.setdefault(storage_of(part), str(error))

    def _compute(
        self, function: Any, sources: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        reason = f"it calls {function}"
        for source in sources:
            self.computed.setdefault(storage_of(source), reason)

        # Let it run on meta tensors, so that the loader continues and the other tensors are recorded.
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:  # it needs the elements
            raise _NotFollowedError(reason) from error


class _Joined(NamedTuple):
    """A concatenation of tensors."""

    whole: torch.Tensor
    parts: list[torch.Tensor]
    dim: int

    def split(
        self, source: torch.Tensor, target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies from the parts that together are a copy of `source`, a view of the whole.

        Raises _NotFollowedError if `source` is not a slice of the whole.
        """
        copied, elements = _destination(self.whole.shape, source, target)
        start = 0

        for part in self.parts:
            starts = [0] * part.ndim
            starts[self.dim] = start
            start += part.shape[self.dim]
            place = TensorSlice(tuple(starts), tuple(map(int.__add__, starts, part.shape)))
            if (common := copied.intersect(place)) is not None:
                yield (
                    part[common.relative_to(place.starts).index],
                    elements[common.relative_to(copied.starts).index],
                )


_COPY = torch.ops.aten.copy_.default
_ZERO = torch.ops.aten.zero_.default
_CAT = torch.ops.aten.cat.default
