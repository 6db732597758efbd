"""Transforms between the parameters of a rank and what it sends, exports and sums up, slice by slice.

A transform computes the elements of any slice of a parameter from what the rank holds. Nothing but the slice,
and intermediate results of its size, is in memory. Every path that reads `Shards` sees the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from megarl.models.adapters import parameter_names
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import Head
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import ShardLayout
from megarl.weights.shards import Shards

if TYPE_CHECKING:  # planning must not import torch
    import torch

# The rows of a product are computed in blocks of this size, whatever slice is asked for. A kernel may round
# blocks of other sizes differently, and the sum of a push must be that of an engine.
_BLOCK_ROWS = 256


class MergedAdapters:
    """Adds the product of an adapter to its projection: W + scale * B A, in float32, rounded once.

    A rank needs nothing from others, because adapters are sharded like their projections.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], scale: float) -> None:
        self._parameters = parameters
        self._scale = scale

    def apply(
        self, megatron_name: str, piece: Piece, region: Sequence[slice], values: torch.Tensor
    ) -> torch.Tensor:
        """Return the merged elements; `values` if the projection has no adapter."""
        names = parameter_names(megatron_name, piece.hf_name)
        if names.a not in self._parameters:
            return values

        # Axes before the last one are rows. Compute those of all elements of the first axis that occur.
        *outer, columns = piece.shard.shape
        per_element = prod(outer[1:])
        first = region[0].start
        rows = slice(first * per_element, region[0].stop * per_element)
        product = self._product(names.a, names.b, rows).view(-1, *outer[1:], columns)

        inner = (slice(0, region[0].stop - first), *region[1:])
        return (values.float() + product[inner]).to(values.dtype)

    def _product(self, a_name: str, b_name: str, rows: slice) -> torch.Tensor:
        """Return rows of scale * B A in float32, computed in fixed blocks."""
        a = self._parameters[a_name].detach().float()
        b = self._parameters[b_name].detach()
        # The rounding of a product may depend on its shape, so the blocks do not depend on the rows.
        begin = rows.start // _BLOCK_ROWS * _BLOCK_ROWS
        product = a.new_empty(rows.stop - rows.start, a.shape[1])

        for start in range(begin, rows.stop, _BLOCK_ROWS):
            block = b[start : start + _BLOCK_ROWS].float() @ a
            low = max(start, rows.start)
            high = min(start + len(block), rows.stop)
            product[low - rows.start : high - rows.start] = block[low - start : high - start]

        return product.mul_(self._scale)


def merged_shards(
    parameters: Mapping[str, torch.Tensor],
    architecture: Architecture,
    layout: ShardLayout,
    head: Head,
    keeps_adapters: bool = False,
) -> Shards:
    """Return the shards of a model as engines get them: with its adapters merged, if it has some.

    Args:
        parameters: The parameters of the rank.
        architecture: The model.
        layout: What the rank holds.
        head: The head of the model.
        keeps_adapters: Whether engines get the adapters separately instead.
    """
    if keeps_adapters:
        return Shards(parameters=parameters, architecture=architecture, layout=layout, head=head)
    lora = architecture.lora
    transform = None if lora is None else MergedAdapters(parameters, lora.scale)
    return Shards(
        parameters=parameters, architecture=architecture.base, layout=layout, head=head, transform=transform
    )
