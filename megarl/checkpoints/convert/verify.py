"""Compares the models in two folders, tensor by tensor and block by block, across formats and layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from math import prod

import torch

from megarl.checkpoints.convert.source import ModelSource, SourceTensor
from megarl.checkpoints.convert.streaming import BLOCK_BYTES, Progress, Room, Workers, no_progress
from megarl.weights.tensors import contiguous_blocks

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Match(Enum):
    identical = "bitwise identical"
    # The dtypes differ, and rounding the wider one gives the bits of the narrower one.
    rounded = "identical after rounding"
    different = "different"
    missing = "missing"


@dataclass(frozen=True, kw_only=True)
class TensorComparison:
    """The comparison of one tensor.

    Attributes:
        num_different: Number of elements with different bits, after rounding.
        max_difference: The largest difference of the stored elements.
        reason: A description of the difference.
    """

    name: str
    match: Match
    num_elements: int = 0
    num_different: int = 0
    max_difference: float = 0.0
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two models.

    Attributes:
        architecture: Fields that differ, as (name, left, right).
        tensors: In the order of the forward pass, then those that are kept (weights/kept_tensors.py), if
            both formats contain such layers.
        num_kept_skipped: Number of such tensors in one of the models, if the other's format has no place for
            them.
    """

    left: ModelSource
    right: ModelSource
    architecture: tuple[tuple[str, object, object], ...]
    tensors: tuple[TensorComparison, ...]
    num_kept_skipped: int = 0

    @property
    def is_same(self) -> bool:
        """Whether the models are the same, possibly in another dtype if tensors are `rounded`."""
        return not self.architecture and not self.differing

    @property
    def differing(self) -> tuple[TensorComparison, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.match in (Match.different, Match.missing))

    def count(self, match: Match) -> int:
        return sum(tensor.match is match for tensor in self.tensors)


def compare(left: ModelSource, right: ModelSource, progress: Progress = no_progress) -> Comparison:
    """Compare two models bitwise: zeros of different sign differ, and NaNs are equal if their bits are.

    Args:
        progress: Receives the bytes of `left` that were compared, and the total.

    Raises:
        CheckpointError: A file cannot be read.
        WeightTransferError: The format of tensors that are kept is not supported.
    """
    of_left, of_right = dict(left.tensors), dict(right.tensors)
    num_kept_skipped = 0
    # Tensors that are kept as they are can be compared only if both formats store them.
    if left.open_kept is not None and right.open_kept is not None:
        of_left |= left.open_kept()
        of_right |= right.open_kept()
    elif (opener := left.open_kept or right.open_kept) is not None:
        num_kept_skipped = len(opener())

    names = list(of_left | of_right)
    total = sum(of_left[name].nbytes for name in names if name in of_left and name in of_right)
    found: dict[str, TensorComparison] = {}
    workers = Workers()

    def job(name: str, room: Room) -> None:
        one, other = of_left.get(name), of_right.get(name)
        if one is None or other is None:
            reason = f"is not in {(right if one is not None else left).folder}"
            found[name] = TensorComparison(name=name, match=Match.missing, reason=reason)
        else:
            found[name] = _compare_tensor(one, other, lambda nbytes: progress(nbytes, total), workers)

    workers.run(partial(job, name) for name in names)
    architecture = [
        (field.name, getattr(left.architecture, field.name), getattr(right.architecture, field.name))
        for field in fields(left.architecture)
        if getattr(left.architecture, field.name) != getattr(right.architecture, field.name)
    ]
    if left.head != right.head:
        architecture.append(("head", left.head, right.head))

    return Comparison(
        left=left,
        right=right,
        architecture=tuple(architecture),
        tensors=tuple(found[name] for name in names),
        num_kept_skipped=num_kept_skipped,
    )


def _compare_tensor(
    one: SourceTensor, other: SourceTensor, done: Callable[[int], None], workers: Workers
) -> TensorComparison:
    name = one.hf.name
    # The views may differ although the shapes agree, if the models have different numbers of heads.
    if one.hf != other.hf:
        how = (
            f"shape {one.hf.shape} and {other.hf.shape}"
            if one.hf.shape != other.hf.shape
            else "split into different heads"
        )
        return TensorComparison(name=name, match=Match.different, reason=how)

    narrowed = _narrower(one.dtype, other.dtype)
    num_different = dict.fromkeys(narrowed, 0)
    max_difference = 0.0
    volume = BLOCK_BYTES // max(one.dtype.itemsize, other.dtype.itemsize)

    for _, place in contiguous_blocks(one.hf.view, volume):
        workers.check()
        left = one.block(place, one.dtype)
        right = other.block(place, other.dtype)
        # Most blocks are identical, and need no pass over the differences.
        if left.dtype != right.dtype or not torch.equal(_bits(left), _bits(right)):
            for dtype in narrowed:
                num_different[dtype] += int((_bits(left.to(dtype)) != _bits(right.to(dtype))).sum())
            max_difference = max(max_difference, _max_difference(left, right))
        done(place.volume * one.dtype.itemsize)

    # The dtype in which the tensors agree best.
    best = min(narrowed, key=lambda dtype: num_different[dtype])
    same = Match.identical if one.dtype == other.dtype else Match.rounded
    words = [str(each).removeprefix("torch.") for each in (one.dtype, other.dtype, best)]
    return TensorComparison(
        name=name,
        match=Match.different if num_different[best] else same,
        num_elements=prod(one.hf.shape),
        num_different=num_different[best],
        max_difference=max_difference,
        reason="" if same is Match.identical else f"{words[0]} and {words[1]}, rounded to {words[2]}",
    )


def _max_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    # Equal infinities count as equal, although their difference is not a number.
    is_same = (left == right) | (left.isnan() & right.isnan())
    apart = (left.double() - right.double()).abs_().nan_to_num_(nan=float("inf"))
    return float(apart.masked_fill_(is_same, 0.0).max())


def _narrower(left: torch.dtype, right: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which two tensors are compared.

    Neither of float16 and bfloat16 contains the other, so either may have been converted from the other.
    """
    if left.itemsize == right.itemsize:
        return (left,) if left == right else (left, right)
    return (min(left, right, key=lambda dtype: dtype.itemsize),)


def _bits(block: torch.Tensor) -> torch.Tensor:
    return block.view(_INTEGERS[block.dtype.itemsize])
