"""The proof that engines hold the trainer's weights: a checksum of every tensor, summed over the shards where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megarl.config.errors import RunError
from megarl.weights.checksum import MODULUS, checksum, row_major_strides
from megarl.weights.receipt import Manifest
from megarl.weights.shard_layout import held_weights, pieces
from megarl.weights.shards import Shards

_MAX_NAMED = 8


def shard_checksums(shards: Shards, dtype: torch.dtype) -> dict[str, int]:
    """Hugging Face name -> what this rank's elements, converted to `dtype`, add to the tensor's checksum."""
    sums: dict[str, int] = {}
    for weight in held_weights(shards.architecture, shards.layout, shards.head):
        parameter = shards.parameters[weight.megatron_name].detach()
        for piece in pieces(weight, shards.layout):
            if not piece.is_source:
                continue
            elements = parameter.view(piece.shard_view)[piece.shard.slices].to(dtype)
            strides = row_major_strides(piece.hf_view)
            first = sum(map(int.__mul__, piece.hf.starts, strides))
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


def compare_checksums(manifest: Manifest, trainer: Mapping[str, int], engine: Mapping[str, int], engine_name: str) -> None:
    """Raises WeightMismatchError that names the tensors that differ, or that one of the two does not have."""
    differing = [name for name in manifest if name not in trainer or trainer[name] != engine.get(name)]
    if differing:
        raise WeightMismatchError(
            f"{engine_name} does not hold the trainer's weights: {len(differing)} of {len(manifest)} tensors differ in their checksums: "
            + ", ".join(differing[:_MAX_NAMED])
        )
