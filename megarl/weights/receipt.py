"""What tensors a model has, and the proof that pieces of them are all there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # plans are made without it
    import torch


class ChunkMeta(NamedTuple):
    """Elements [offset, offset + numel) of the row-major Hugging Face tensor `name`."""

    name: str
    offset: int
    numel: int


class WeightTransferError(ValueError):
    """A tensor is missing, extra, doubled or wrongly shaped; the message names it."""


@dataclass(frozen=True)
class TensorMeta:
    shape: tuple[int, ...]
    dtype: torch.dtype


Manifest = Mapping[str, TensorMeta]  # Hugging Face name -> shape and dtype, of every tensor of a model


@dataclass
class WeightReceipt:
    """Counts what has arrived against a manifest, so that a load is complete or an error."""

    manifest: Manifest
    _arrived: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def record(self, chunk: ChunkMeta, dtype: torch.dtype) -> None:
        """Raises WeightTransferError for an unknown name, a wrong dtype, or elements outside the tensor."""
        meta = self.manifest.get(chunk.name)
        if meta is None:
            raise WeightTransferError(f"tensor {chunk.name!r} is not in the model's manifest")
        if dtype != meta.dtype:
            raise WeightTransferError(f"tensor {chunk.name!r} arrived as {dtype}, the manifest says {meta.dtype}")
        end = chunk.offset + chunk.numel
        if chunk.offset < 0 or end > prod(meta.shape):
            raise WeightTransferError(f"tensor {chunk.name!r}: elements {chunk.offset}..{end} lie outside shape {meta.shape}")
        self._arrived.setdefault(chunk.name, []).append((chunk.offset, end))

    def close(self) -> None:
        """Raises WeightTransferError that names the tensors of which an element is missing or came twice."""
        wrong = []
        for name, meta in self.manifest.items():
            position = 0
            for start, end in sorted(self._arrived.get(name, [])):
                if start != position:
                    wrong.append(f"{name} ({'twice' if start < position else 'missing'} at element {min(start, position)})")
                    break
                position = end
            else:
                if position != prod(meta.shape):
                    wrong.append(f"{name} (missing from element {position} of {prod(meta.shape)})")
        if wrong:
            raise WeightTransferError(f"{len(wrong)} tensors incomplete or doubled: " + ", ".join(wrong[:8]))
