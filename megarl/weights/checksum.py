"""The proof that engines hold the trainer's weights: a checksum of every tensor that adds up over any cut of
it, so that shards and engine copies are compared without bringing them together.

    checksum = sum over elements i of bits(x_i) * w(i)  modulo 2**64

`bits` reads an element's bytes as a whole number; w(i) is an odd pseudo-random number of the element's flat
index in the row-major Hugging Face tensor. A single changed element always changes the sum (an odd factor has
an inverse); elements that were swapped, moved or lost change it but for a chance of about 2**-31.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megarl.machine.errors import RunError
from megarl.weights.shard_layout import held_weights, pieces
from megarl.weights.shards import Shards
from megarl.weights.tensors import Manifest, contiguous_blocks, flat_index, row_major_strides

MODULUS = 2**64
_MAX_NAMED = 8
# At a time: on a CPU a few times 256 KiB of whole numbers, which stay in a core's cache; on a GPU so many
# that the launches of a dozen kernels are nothing beside their work, in a few times 128 MiB.
BLOCK_ELEMENTS = {"cpu": 2**15, "cuda": 2**24}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687)  # of SplitMix64, as signed numbers


def checksum(values: torch.Tensor, first: int = 0, strides: Sequence[int] | None = None) -> int:
    """The part that `values` (any shape and strides, on any device) adds: a number in [0, 2**64).

    Its element [i, j, ...] is element first + i * strides[0] + j * strides[1] + ... of the whole tensor;
    `strides` None: it is a contiguous part. Parts that hold each element of the tensor once add up, modulo
    2**64, to the checksum of the whole. Memory for 2**15 elements is used, on a GPU for 2**24: up to four
    times eight bytes each. Raises ValueError for elements of more than four bytes.
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

    # Bits are summed as whole numbers, so that NaN and negative zero count as they are stored.
    integers = values.detach().view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)

    # Block by block, so that the factors of a large tensor are never all in memory.
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
    """Odd numbers that look random; `index` is overwritten. Whole numbers overflow on purpose, which is what
    modulo 2**64 means."""
    weights = index.add_(1).mul_(_MULTIPLIERS[0])
    weights.bitwise_xor_(weights >> 29).mul_(_MULTIPLIERS[1])
    weights.bitwise_xor_(weights >> 32)
    return weights.bitwise_or_(1)


def shard_checksums(
    shards: Shards, dtype: torch.dtype, *, dense: bool = True, experts: bool = True
) -> dict[str, int]:
    """Hugging Face name -> what this rank's elements, converted to `dtype`, add to the tensor's checksum.

    experts, dense: whether experts' tensors, and the others, are among them; other ranks may hold copies of
    either.
    """
    sums: dict[str, int] = {}
    for weight in held_weights(shards.architecture, shards.layout, shards.head):
        if not (dense if weight.expert is None else experts):
            continue
        parameter = shards.parameters[weight.megatron_name].detach()
        for piece in pieces(weight, shards.layout):
            # Elements that several ranks hold must enter the sum once.
            if not piece.is_source:
                continue
            elements = parameter.view(piece.shard_view)[piece.shard.index].to(dtype)
            # An element's factor follows from its place in the whole tensor, not in the shard.
            strides = row_major_strides(piece.hf_view)
            first = flat_index(piece.hf.starts, strides)
            sums[piece.hf_name] = sums.get(piece.hf_name, 0) + checksum(elements, first, strides)

    return sums


def add_checksums(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Of the whole tensors, from those of all ranks that hold the model once."""
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = (sums.get(name, 0) + value) % MODULUS
    return sums


class WeightMismatchError(RunError):
    """An engine says other checksums than the trainer; the message names the tensors."""


def compare_checksums(
    manifest: Manifest, trainer: Mapping[str, int], engine: Mapping[str, int], engine_name: str
) -> None:
    """Raises WeightMismatchError that names the tensors that differ, or that one of the two does not have."""
    differing = [name for name in manifest if name not in trainer or trainer[name] != engine.get(name)]
    if differing:
        raise WeightMismatchError(
            f"{engine_name} does not hold the trainer's weights: {len(differing)} of {len(manifest)} "
            f"tensors differ in their checksums: " + ", ".join(differing[:_MAX_NAMED])
        )
