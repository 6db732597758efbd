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
from itertools import accumulate
from math import lcm, prod
from operator import add
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import MODEL_KEYS, ROUTED_EXPERTS, first_with_prompt
from megarl.config.batch_arithmetic import padded_length
from megarl.engine.context import ALONE, ContextParallelRank, own_tokens
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device
from megarl.engine.rotary import set_positions

_NOT_FOR_THE_LOSS = ("prompts", "responses", ROUTED_EXPERTS)


class TokenPositions(NamedTuple):
    """Of a rank's packed tokens, on the host. sources: (T,) their places among the tokens of the rows, one
    row's behind the other's, and the place behind these of what pads. lengths: (b,) tokens of each row.
    origins: (N,) for each of the rows' tokens the one that stands for it: of a prompt that rows share that of
    the first row, else itself."""

    sources: Tensor
    lengths: Tensor
    origins: Tensor


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


def _aligned(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


class _Layout(NamedTuple):
    """Where b rows stand in a packed sequence. sources: the places of its tokens among those of the rows one
    after the other, and the place behind these of what pads; prompts, responses: (b,) where each row's
    prompt, which may be another row's too, and its response begin. lengths, prompt_of: see PackedRows."""

    sources: Tensor
    prompts: Tensor
    responses: Tensor
    lengths: list[int]
    prompt_of: list[int | None]


def _lay_out(
    prompts: Sequence[int], responses: Sequence[int], first_with_prompt: Sequence[int], num_ranks: int
) -> _Layout:
    """Each row is a sequence; of rows that have one prompt it is the first, and their responses follow.
    Arguments: (b,) each, lengths of prompts and responses, and for each row the first row with its prompt;
    and how many ranks share the rows."""
    starts = [0, *accumulate(map(add, prompts, responses))]

    # The rows that have the same prompt, by the first of them.
    members: dict[int, list[int]] = {}
    for row, first in enumerate(first_with_prompt):
        members.setdefault(first, []).append(row)
    spans: list[tuple[int, int]] = []  # of sources, one for each sequence
    prompt_of: list[int | None] = []
    prompt_places = [0] * len(prompts)
    response_places = [0] * len(prompts)
    place = 0

    def put(begin: int, end: int, continues: int | None) -> None:
        nonlocal place

        # A response may be empty, but a packed batch holds no empty sequence.
        if end > begin:
            spans.append((begin, end))
            prompt_of.append(continues)
            place += padded_length(end - begin, num_ranks)

    # A shared prompt is a sequence of its own, directly followed by the responses to it.
    for first, rows in members.items():
        shares = len(rows) > 1
        prompt_place = place
        number = len(spans)
        put(starts[first], starts[first] + prompts[first] if shares else starts[first + 1], None)
        for row in rows:
            prompt_places[row] = prompt_place
            response_places[row] = place if shares else prompt_place + prompts[row]
            if shares:
                put(starts[row] + prompts[row], starts[row + 1], number)

    # Each sequence is padded by itself, with the place behind all real tokens.
    lengths = [end - begin for begin, end in spans]
    padding = [padded_length(length, num_ranks) - length for length in lengths]
    sources = torch.cat(
        [
            F.pad(torch.arange(*span), (0, pad), value=starts[-1])
            for span, pad in zip(spans, padding, strict=True)
        ]
    )

    return _Layout(sources, torch.tensor(prompt_places), torch.tensor(response_places), lengths, prompt_of)


class _Rows(NamedTuple):
    """b rows without padding, one after the other. prompts, responses: (b,) tokens of each. ids: (T,).
    row_of, offset: (T,) of each token its row and its place in that. counts: (T,) 1 in rows of which the loss
    reads a token, else 0. response_row, response_offset: (N,) of each response token its row and its place in
    the response."""

    prompts: Tensor
    responses: Tensor
    ids: Tensor
    row_of: Tensor
    offset: Tensor
    counts: Tensor
    response_row: Tensor
    response_offset: Tensor

    @classmethod
    def of(cls, prompts: Tensor, responses: Tensor, ids: Tensor, is_read: Tensor) -> _Rows:
        """is_read: (b,) whether the loss reads a token of the row."""
        rows = torch.arange(len(prompts))
        lengths = prompts + responses
        row_of = torch.repeat_interleave(rows, lengths)
        response_row = torch.repeat_interleave(rows, responses)
        offset = torch.arange(len(row_of)) - (lengths.cumsum(0) - lengths)[row_of]
        response_offset = torch.arange(len(response_row)) - (responses.cumsum(0) - responses)[response_row]

        return cls(
            prompts, responses, ids, row_of, offset, is_read.long()[row_of], response_row, response_offset
        )

    @property
    def predictors(self) -> Tensor:
        """(N,) of each response token the place in its row of what predicts it."""
        return self.prompts[self.response_row] + self.response_offset - 1

    def origins(self, firsts: Sequence[int]) -> Tensor:
        """See TokenPositions. firsts: of each row the first one with its prompt."""
        lengths = self.prompts + self.responses
        starts = (lengths.cumsum(0) - lengths)[torch.tensor(firsts)]
        return torch.where(
            self.offset < self.prompts[self.row_of],
            starts[self.row_of] + self.offset,
            torch.arange(len(self.offset)),
        )


class _ModelInputs(NamedTuple):
    """As in MicroBatch, on the host but for `packed`. predictors: (N,) places among all tokens. scored: (N,)
    which of the rows' response tokens these are of."""

    tokens: Tensor
    positions: Tensor
    packed: PackedRows | None
    counts: Tensor
    places: TokenPositions | None
    predictors: Tensor
    scored: Tensor


class SequenceSlice(NamedTuple):
    """Over how many ranks sequence parallelism cuts the tokens of a micro-batch, and which of them this
    is."""

    size: int
    rank: int


UNCUT = SequenceSlice(1, 0)


def _predicting(predictors: Tensor, num_tokens: int, cut: SequenceSlice) -> tuple[Tensor, Tensor]:
    """predictors: (N,) places among T tokens. Returns (K,) the places of those tokens, each once, in this
    rank's part of the T, and (N,) the places of `predictors` among what all ranks have chosen, one rank's
    behind the other's. Ranks choose equally many, at least one, for which the first token of a part stands
    in."""
    size = num_tokens // cut.size

    # Rows that share a prompt also share the predictor of their first response token.
    chosen, number = predictors.unique(return_inverse=True)
    part = chosen // size
    counts = part.bincount(minlength=cut.size)

    # The ranks' outputs are gathered, for which all parts must have the same length.
    most = max(1, int(counts.max()))
    among = torch.arange(len(chosen)) + (torch.arange(cut.size) * most - (counts.cumsum(0) - counts))[part]
    own = chosen[part == cut.rank] - cut.rank * size

    return F.pad(own, (0, most - len(own))), among[number]


def _packed(
    rows: _Rows, share_prompts: bool, cut: SequenceSlice, place: ContextParallelRank, device: torch.device
) -> _ModelInputs:
    # For each row the first one with the same prompt; without sharing each row is its own.
    firsts: Sequence[int] = range(len(rows.prompts))
    if share_prompts:
        of_rows = zip(
            rows.ids.split((rows.prompts + rows.responses).tolist()), rows.prompts.tolist(), strict=True
        )
        firsts = first_with_prompt(tokens[:num_prompt] for tokens, num_prompt in of_rows)

    layout = _lay_out(rows.prompts.tolist(), rows.responses.tolist(), firsts, place.size)
    num_tokens = len(layout.sources)

    # Every rank's part is a multiple of the cut, and what pads the whole is one more sequence, of which all
    # have their chunks.
    padding = (
        _aligned(num_tokens, cut.size if place.size == 1 else place.size * lcm(2, cut.size)) - num_tokens
    )
    last = [padding] if padding else []

    # Places in the packed sequence, of the predictors inside responses and of all tokens of the rows.
    in_response = layout.responses[rows.response_row] + rows.response_offset - 1
    prompts = rows.prompts[rows.row_of]
    places = rows.offset + torch.where(
        rows.offset < prompts, layout.prompts[rows.row_of], layout.responses[rows.row_of] - prompts
    )
    packed = PackedRows([*layout.lengths, *last], device, [*layout.prompt_of, *(None for _ in last)], place)
    own = own_tokens(packed.lengths, place)
    sources = F.pad(layout.sources, (0, padding), value=len(rows.ids))[own]

    # From places in the whole batch to those among this rank's tokens; -1 for the tokens of other ranks.
    here = torch.full((num_tokens + padding,), -1)
    here[own] = torch.arange(len(own))

    # A prompt token that rows share counts once for each of them.
    counts = torch.zeros(num_tokens + padding, dtype=torch.long).index_add_(0, places, rows.counts)

    # The first token of a response is predicted by the prompt's last one, which may stand elsewhere.
    predictors = here[
        torch.where(
            rows.response_offset == 0, layout.prompts[rows.response_row] + rows.predictors, in_response
        )
    ]

    # This rank scores the tokens whose predictors it holds.
    scored = (predictors >= 0).nonzero()[:, 0]

    return _ModelInputs(
        tokens=F.pad(rows.ids, (0, 1))[sources][None],
        positions=F.pad(rows.offset, (0, 1))[sources][None],
        packed=packed,
        counts=counts[own][None],
        places=TokenPositions(sources, rows.prompts + rows.responses, rows.origins(firsts)),
        predictors=predictors[scored],
        scored=scored,
    )


def _padded(rows: _Rows, cut: SequenceSlice) -> _ModelInputs:
    num_rows = len(rows.prompts)
    longest = _aligned(int((rows.prompts + rows.responses).max()), cut.size)

    # Zeros pad on the right, where the causal mask keeps them from the real tokens.
    tokens = torch.zeros(num_rows, longest, dtype=torch.long)
    tokens[rows.row_of, rows.offset] = rows.ids
    counts = torch.zeros_like(tokens)
    counts[rows.row_of, rows.offset] = rows.counts
    predictors = rows.predictors * num_rows + rows.response_row  # hidden states are (S', b, H)

    return _ModelInputs(
        tokens,
        torch.arange(longest).expand(num_rows, -1),
        None,
        counts,
        None,
        predictors,
        torch.arange(len(predictors)),
    )


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
    real = _Rows.of(prompts.lengths, responses.lengths, ids.long(), is_read)
    inputs = _packed(real, share_prompts, cut, place, device) if packing else _padded(real, cut)
    positions = to_device(inputs.positions, device)
    predictors = inputs.predictors

    # The rotary embedding would count from 0 in every sequence, which is wrong where rows are shared or cut.
    if inputs.packed is not None and inputs.packed.needs_positions:
        set_positions(inputs.packed.cu_seqlens_q, positions[0])

    # From here on predictors count among the tokens that the last layer keeps.
    if inputs.packed is not None and ends_with_predictors:
        chosen, predictors = _predicting(predictors, inputs.tokens.numel(), cut)
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
