"""The rows of a batch for gated delta nets: which tokens each row's state depends on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.engine.context import whole_order
from megarl.engine.gated_delta_rule import RowChunks, row_chunks
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device


class DeltaRows(NamedTuple):
    """The rows of a batch, each with all tokens that its state depends on.

    Attributes:
        tokens: (R,) the tokens of all rows among those of the batch in rank order. None: the batch in order.
        own: For each token of the batch in rank order, its index among R. None: the batch in order.
        bounds: (rows + 1,) int64, the boundaries of the rows among R.
    """

    tokens: Tensor | None
    own: Tensor | None
    bounds: Tensor
    chunks: RowChunks


def delta_rows(packed: PackedRows) -> DeltaRows:
    """Return the rows of a packed batch. They are determined once per micro-batch and cached."""
    if packed.delta_rows is None:
        packed.delta_rows = _rows_with_prompts(packed)
    return packed.delta_rows


def _rows_with_prompts(packed: PackedRows) -> DeltaRows:
    device = packed.cu_seqlens_q.device
    starts = [sum(packed.lengths[:number]) for number in range(len(packed.lengths))]
    in_order = packed.place.size == 1 and not packed.shares_prompts

    # Positions in the batch of each row's prompt and of its own tokens.
    lengths = []
    positions = []
    own = []
    total = 0
    for start, length, prompt in zip(starts, packed.lengths, packed.prompts, strict=True):
        total += len(prompt)
        positions += [torch.arange(prompt.start, prompt.stop), torch.arange(start, start + length)]
        own.append(torch.arange(total, total + length))
        lengths.append(len(prompt) + length)
        total += length

    bounds = torch.tensor(lengths).cumsum(0)
    bounds = to_device(torch.cat((bounds.new_zeros(1), bounds)), device)
    chunks = row_chunks(lengths, device)
    if in_order:
        return DeltaRows(None, None, bounds, chunks)

    # Ranks exchange their tokens in rank order.
    order = whole_order(packed.lengths, packed.place.size)
    tokens = order[torch.cat(positions)]
    own_in_rank_order = torch.empty_like(order)
    own_in_rank_order[order] = torch.cat(own)
    return DeltaRows(to_device(tokens, device), to_device(own_in_rank_order, device), bounds, chunks)


def equal_rows(count: int, length: int, device: torch.device) -> DeltaRows:
    """Return the rows of a padded batch, one after another."""
    bounds = torch.arange(0, count * length + 1, length, device=device)
    return DeltaRows(None, None, bounds, row_chunks([length] * count, device))
