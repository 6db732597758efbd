"""Micro-batches: rows of a batch as one packed sequence without padding, or padded on the right.

Either way a sequence starts at its first real token. Packed rows of one prompt may share its tokens: they
stand there once, as a sequence that the responses continue, each a sequence of its own (shared_prompts.py).
Ranks that share rows have some tokens of each sequence (context.py), and score those response tokens whose
predictors these are. The logits that predict response token j of a row with p prompt tokens stand at position
p + j - 1; values are read there too, V(s_t) being the value before token t is written. Of packed rows these
tokens alone go on behind the attention of a dense model's last layer, where nobody reads the others any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import MODEL_KEYS, ROUTED_EXPERTS
from megarl.engine.context import ALONE, ContextParallelRank
from megarl.engine.micro_batch_layout import (
    UNCUT,
    ConcatenatedRows,
    SequenceSlice,
    TokenPositions,
    logit_positions,
    packed_inputs,
    padded_inputs,
)
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device
from megarl.engine.rotary import set_positions

_NOT_FOR_THE_LOSS = ("prompts", "responses", ROUTED_EXPERTS)


class MicroBatchRoutes:
    """The experts of a rank's tokens in one micro-batch, in the order in which its routers see them, by layer
    among those with experts: (T, K), on the device.

    given: the experts to take, for the tokens of `is_given` (T,); without them a router chooses. chosen: what
    it chose, where that is kept.
    """

    def __init__(self, given: Mapping[int, Tensor] | None, is_given: Tensor | None) -> None:
        self.given = given
        self.is_given = is_given
        self.chosen: dict[int, Tensor] = {}


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Model inputs for b rows, and where their response tokens are.

    tokens, positions: (1, T) packed or (b, S') padded. counts: of the same shape, how often a token counts in
    what routers of experts
    count: once for each row that it is of and of which the loss reads a token, and not where it pads;
    num_counted: their sum.
    predictors: (N,) places in the model's flattened (sequence-major) output that predict the N response
    tokens; targets: (N,) those tokens; scored: (N,) their numbers among the M response tokens of all rows,
    one row behind the other. Where ranks share the rows these are the rank's own tokens, and N may be 0;
    `cells` (M,), the places of all response tokens in a flattened (b, R), and `rows` are whole.
    """

    tokens: Tensor
    positions: Tensor
    packed: PackedRows | None
    counts: Tensor
    num_counted: int
    places: TokenPositions | None  # of packed rows
    predictors: Tensor
    targets: Tensor
    scored: Tensor
    cells: Tensor
    rows: Mapping[str, Tensor]  # the columns of response tokens, (b, R) padded with 0, for the loss
    shape: tuple[int, int]  # b, R
    routes: MicroBatchRoutes | None = None  # where they are replayed

    def of_all_tokens(self, values: Tensor) -> Tensor:
        """Return (M,) of all response tokens, 0 where a token is another rank's, of values (N,) of this
        rank's. Differentiable."""
        # `scored` ascends, so that a rank that has all of them has them in order.
        if len(self.scored) == len(self.cells):
            return values
        return values.new_zeros(len(self.cells)).index_copy(0, self.scored, values)

    def padded(self, values: Tensor) -> Tensor:
        """Return (b, R), 0 where there is no token, of values (M,) of all response tokens. Differentiable."""
        return values.new_zeros(prod(self.shape)).index_copy(0, self.cells, values).view(self.shape)


def make_micro_batch(
    batch: Mapping[str, RaggedTensor],
    rows: Sequence[int],
    *,
    packing: bool,
    share_prompts: bool,
    ends_with_predictors: bool,
    device: torch.device,
    cut: SequenceSlice = UNCUT,
    place: ContextParallelRank = ALONE,
) -> MicroBatch:
    """Cuts `rows` out of `batch`: `prompts`, `responses`, `response_mask`, and columns of the response tokens
    for the loss, which gets them padded to the longest response of these rows.

    `share_prompts`: of packed rows with the same prompt its tokens stand there once. `ends_with_predictors`:
    of packed rows the model's last layer goes on with the tokens alone that predict one, and gives these.
    `cut`: the number of this rank's tokens is made a multiple of its size by padding. `place`: of the rank
    among those that share packed rows. Raises ValueError when a row has no prompt token, when a column does
    not have a value for each response token, and when ranks are to share rows that are not packed.
    """
    if place.size > 1 and not packing:
        raise ValueError(
            f"context_parallel_size {place.size} cuts rows that are packed: use engine.packing=true"
        )

    columns = {key: column.select(torch.as_tensor(rows)) for key, column in batch.items()}
    _check_rows(columns, rows)
    prompts, responses, response_mask = (columns[key] for key in MODEL_KEYS)

    # Each row is its prompt and its response; the model takes ids in int64.
    ids = torch.cat([part for row in zip(prompts.each(), responses.each(), strict=True) for part in row])
    is_read = torch.tensor([bool(mask.any()) for mask in response_mask.each()])
    real = ConcatenatedRows.of(prompts.lengths, responses.lengths, ids.long(), is_read)
    inputs = packed_inputs(real, share_prompts, cut, place, device) if packing else padded_inputs(real, cut)
    positions = to_device(inputs.positions, device)
    predictors = inputs.predictors

    # The rotary embedding would count from 0 in every sequence, which is wrong where rows are shared or cut.
    if inputs.packed is not None and inputs.packed.needs_positions:
        set_positions(inputs.packed.cu_seqlens_q, positions[0])

    # From here on predictors count among the tokens that the last layer keeps.
    if inputs.packed is not None and ends_with_predictors:
        chosen, predictors = logit_positions(predictors, inputs.tokens.numel(), cut)
        inputs.packed.predicting = to_device(chosen, device)

    # Places of the response tokens among each other, and in tensors that are padded for the loss.
    num_rows, response_length = responses.shape
    cells = real.response_row * response_length + real.response_offset
    targets = responses.flat()[inputs.scored].long()

    return MicroBatch(
        tokens=to_device(inputs.tokens, device),
        positions=positions,
        packed=inputs.packed,
        counts=to_device(inputs.counts, device),
        num_counted=int(inputs.counts.sum()),
        places=inputs.places,
        predictors=to_device(predictors, device),
        targets=to_device(targets, device),
        scored=to_device(inputs.scored, device),
        cells=to_device(cells, device),
        rows={
            key: to_device(column.padded(), device)
            for key, column in columns.items()
            if key not in _NOT_FOR_THE_LOSS
        },
        shape=(num_rows, response_length),
    )


def _check_rows(columns: Mapping[str, RaggedTensor], rows: Sequence[int]) -> None:
    """rows: the numbers of these rows in the batch, for the errors."""
    if empty := (columns["prompts"].lengths == 0).nonzero().flatten().tolist():
        raise ValueError(
            f"row {rows[empty[0]]} of the batch has no prompt; a prompt needs at least one token"
        )

    # A value that belongs to another token would be used without an error.
    lengths = columns["responses"].lengths
    for key, column in columns.items():
        if key not in _NOT_FOR_THE_LOSS and not torch.equal(column.lengths, lengths):
            row = int((column.lengths != lengths).nonzero()[0])
            raise ValueError(
                f"row {rows[row]} of the batch: {key!r} has {int(column.lengths[row])} values for a response "
                f"of {int(lengths[row])} tokens"
            )
