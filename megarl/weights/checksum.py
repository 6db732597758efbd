"""Prove that engines hold the trainer's weights with checksums that add up over any partition of a tensor.

Shards and engine copies can therefore be compared without gathering them:

    checksum = sum over elements i of bits(x_i) * w(i)  modulo 2**64

`bits` reads an element's bytes as an integer. w(i) is an odd pseudo-random number that depends on the
element's flat index in the row-major Hugging Face tensor. Changing a single element always changes the sum,
because an odd factor has an inverse. Swapped, moved or lost elements change it except with a probability of
about 2**-31.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from operator import add

import torch

from megarl.machine.errors import RunError
from megarl.weights.manifest import dtype_of
from megarl.weights.shard_layout import held_weights, pieces
from megarl.weights.shards import Shards
from megarl.weights.tensors import Manifest, contiguous_blocks, flat_index, row_major_strides

MODULUS = 2**64
_MAX_NAMED = 8
# Elements per block. On a CPU: a few times 256 KiB of integers, which fit in a core's cache. On a GPU: enough
# that kernel launches are negligible, in a few times 128 MiB.
BLOCK_ELEMENTS = {"cpu": 2**15, "cuda": 2**24}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687)  # the SplitMix64 constants as signed integers


def checksum(values: torch.Tensor, first: int = 0, strides: Sequence[int] | None = None) -> int:
    """Return what `values` contributes to the checksum of its tensor, a number in [0, 2**64).

    The contributions of parts that contain each element once add up, modulo 2**64, to the checksum of the
    whole tensor. The function uses memory for 2**15 elements (2**24 on a GPU), up to four times eight bytes
    each.

    Args:
        values: Elements of any shape and strides, on any device.
        first: The flat index of the first element in the whole tensor.
        strides: Element [i, j, ...] is element first + i * strides[0] + j * strides[1] + ... of the whole
            tensor. None: `values` is a contiguous part.

    Raises:
        ValueError: Elements are larger than four bytes.
    """
    if values.element_size() not in _INTEGERS:
        raise ValueError(
            f"checksum: {values.dtype} has elements of {values.element_size()} bytes; at most four are "
            f"supported"
        )

    strides = row_major_strides(values.shape) if strides is None else strides
    if values.dim() == 0:
        values = values.view(1)
        strides = (1,)

    # Bits are summed as integers, so that NaN and negative zero count as stored.
    integers = values.detach().view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)

    # Work block by block, so that the factors of a large tensor are never all in memory.
    for _, block in (
        contiguous_blocks(values.shape, BLOCK_ELEMENTS[values.device.type]) if values.numel() else ()
    ):
        start = first + flat_index(block.starts, strides)
        total += (
            _weights(_indices(block.shape, start, strides, values.device)).mul_(integers[block.index]).sum()
        )

    return int(total) % MODULUS


def _indices(shape: Sequence[int], first: int, strides: Sequence[int], device: torch.device) -> torch.Tensor:
    index = torch.full((), first, dtype=torch.int64, device=device)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = torch.arange(size, dtype=torch.int64, device=device).mul_(stride)
        index = index + steps.view(size, *(1 for _ in shape[dim + 1 :]))
    return index


def _weights(index: torch.Tensor) -> torch.Tensor:
    """Return odd pseudo-random int64 numbers. Overwrites `index`; overflow implements modulo 2**64."""
    weights = index.add_(1).mul_(_MULTIPLIERS[0])
    weights.bitwise_xor_(weights >> 29).mul_(_MULTIPLIERS[1])
    weights.bitwise_xor_(weights >> 32)
    return weights.bitwise_or_(1)


def shard_checksums(
    shards: Shards,
    dtype: torch.dtype,
    *,
    dense: bool = True,
    experts: bool = True,
    leave_out: Container[str] = (),
) -> dict[str, int]:
    """Return what this rank's elements, converted to `dtype`, contribute to the checksum of each tensor.

    Args:
        shards: The parameters of the rank.
        dtype: The dtype of the model, in which elements are compared unless the table names another.
        dense: Whether to include tensors other than experts. Other ranks may hold copies of them.
        experts: Whether to include experts. Other ranks may hold copies of them.
        leave_out: The names of tensors that are not included.

    Returns:
        Contributions by Hugging Face name.
    """
    sums: dict[str, int] = {}
    for weight in held_weights(shards.architecture, shards.layout, shards.head):
        if not (dense if weight.expert is None else experts):
            continue
        for piece in pieces(weight, shards.layout):
            # Elements that several ranks hold must be counted once.
            if not piece.is_source or piece.hf_name in leave_out:
                continue
            # The factor of an element depends on its position in the whole tensor, not in the shard.
            strides = row_major_strides(piece.hf_view)
            limit = BLOCK_ELEMENTS[shards.device.type]
            for starts, block in shards.blocks(weight.megatron_name, piece, limit):
                elements = block.to(dtype_of(weight, dtype))
                first = flat_index(tuple(map(add, piece.hf.starts, starts)), strides)
                sums[piece.hf_name] = sums.get(piece.hf_name, 0) + checksum(elements, first, strides)

    return sums


def add_checksums(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add the contributions of all ranks of one replica to the checksums of whole tensors."""
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = (sums.get(name, 0) + value) % MODULUS
    return sums


class WeightMismatchError(RunError):
    """An engine reports other checksums than the trainer. The message names the tensors."""


def compare_checksums(
    manifest: Manifest, trainer: Mapping[str, int], engine: Mapping[str, int], engine_name: str
) -> None:
    """Compare the checksums of the trainer and an engine.

    Raises:
        WeightMismatchError: Tensors differ, or one side lacks them. The message names them.
    """
    differing = [name for name in manifest if name not in trainer or trainer[name] != engine.get(name)]
    if differing:
        raise WeightMismatchError(
            f"{engine_name} does not hold the trainer's weights: {len(differing)} of {len(manifest)} "
            f"tensors differ in their checksums: " + ", ".join(differing[:_MAX_NAMED])
        )
