"""Arrange the rows of a micro-batch as model inputs: packed without padding, or padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import lcm
from operator import add
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.batch.token_rows import ImagePlace, first_with_prompt
from megarl.config.batch_arithmetic import padded_length, rounded_up
from megarl.engine.context import RankSlice, own_tokens
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device


class TokenPositions(NamedTuple):
    """The positions of a rank's packed tokens, on the host.

    Attributes:
        sources: (T,) the index of each token in the concatenated rows. Padding has the index after the last
            token.
        lengths: (b,) the number of tokens of each row.
        origins: (N,) the representative of each token of the rows: for a shared prompt the token of the first
            row, otherwise the token itself.
    """

    sources: Tensor
    lengths: Tensor
    origins: Tensor


def _lay_out(
    prompts: Sequence[int], responses: Sequence[int], first_with_prompt: Sequence[int], num_ranks: int
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int | None]]:
    """Lay out rows as sequences. A shared prompt is a sequence, followed by the responses of its rows.

    Args:
        prompts: (b,) lengths of the prompts.
        responses: (b,) lengths of the responses.
        first_with_prompt: (b,) for each row, the first row with its prompt.
        num_ranks: The number of ranks that share the rows.

    Returns:
        The index of each token in the concatenated rows, where padding has the index after the last token;
        (b,) where the prompt of each row begins, which rows may share; (b,) where its response begins; and
        the lengths and `prompt_of` of PackedRows.
    """
    starts = [0, *accumulate(map(add, prompts, responses))]

    # The rows with equal prompts, by the first of them.
    members: dict[int, list[int]] = {}
    for row, first in enumerate(first_with_prompt):
        members.setdefault(first, []).append(row)
    spans: list[tuple[int, int]] = []  # the range of sources of each sequence
    prompt_of: list[int | None] = []
    prompt_places = [0] * len(prompts)
    response_places = [0] * len(prompts)
    place = 0

    def put(begin: int, end: int, continues: int | None) -> None:
        nonlocal place

        # A response may be empty, but a packed batch must not contain an empty sequence.
        if end > begin:
            spans.append((begin, end))
            prompt_of.append(continues)
            place += padded_length(end - begin, num_ranks)

    # A shared prompt is a separate sequence, directly followed by the responses to it.
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

    # Each sequence is padded separately, with the index after all real tokens.
    lengths = [end - begin for begin, end in spans]
    padding = [padded_length(length, num_ranks) - length for length in lengths]
    sources = torch.cat(
        [
            F.pad(torch.arange(*span), (0, pad), value=starts[-1])
            for span, pad in zip(spans, padding, strict=True)
        ]
    )

    return sources, torch.tensor(prompt_places), torch.tensor(response_places), lengths, prompt_of


class ConcatenatedRows(NamedTuple):
    """b rows without padding, concatenated.

    Attributes:
        prompts: (b,) the number of prompt tokens of each row.
        responses: (b,) the number of response tokens of each row.
        ids: (T,) token ids.
        row_of: (T,) the row of each token.
        offset: (T,) the position of each token in its row.
        counts: (T,) 1 in rows with a token that the loss reads, else 0.
        response_row: (N,) the row of each response token.
        response_offset: (N,) the position of each response token in its response.
    """

    prompts: Tensor
    responses: Tensor
    ids: Tensor
    row_of: Tensor
    offset: Tensor
    counts: Tensor
    response_row: Tensor
    response_offset: Tensor

    @classmethod
    def of(cls, prompts: Tensor, responses: Tensor, ids: Tensor, is_read: Tensor) -> ConcatenatedRows:
        """Concatenate rows. `is_read` (b,) is whether the loss reads a token of the row."""
        rows = torch.arange(len(prompts))
        lengths = prompts + responses
        row_of = torch.repeat_interleave(rows, lengths)
        response_row = torch.repeat_interleave(rows, responses)
        # The cumulative sum up to a row, without the row, is its start in the concatenation.
        offset = torch.arange(len(row_of)) - (lengths.cumsum(0) - lengths)[row_of]
        response_offset = torch.arange(len(response_row)) - (responses.cumsum(0) - responses)[response_row]

        return cls(
            prompts, responses, ids, row_of, offset, is_read.long()[row_of], response_row, response_offset
        )

    @property
    def predictors(self) -> Tensor:
        """(N,) the position in its row of the token that predicts each response token."""
        return self.prompts[self.response_row] + self.response_offset - 1

    def origins(self, firsts: Sequence[int]) -> Tensor:
        """Return `TokenPositions.origins`, given the first row with the prompt of each row."""
        lengths = self.prompts + self.responses
        starts = (lengths.cumsum(0) - lengths)[torch.tensor(firsts)]

        # Only prompts are shared. A response token is its own origin.
        return torch.where(
            self.offset < self.prompts[self.row_of],
            starts[self.row_of] + self.offset,
            torch.arange(len(self.offset)),
        )


class ModelInputs(NamedTuple):
    """The tokens of a micro-batch on this rank.

    Attributes:
        tokens: (1, T) packed or (b, S') padded, int64.
        positions: Positions for the rotary embedding, shaped like `tokens`.
        packed: The packed rows, on the device.
        counts: How often each token counts in router statistics, shaped like `tokens`: once for each row that
            contains it and has a token that the loss reads; 0 for padding.
        places: The positions of packed tokens, on the host.
        predictors: (N,) indices among all tokens, in the sequence-major order of the model's output, that
            predict the N response tokens.
        scored: (N,) the indices of these N among the M response tokens of all rows, concatenated row by row.
    """

    tokens: Tensor
    positions: Tensor
    packed: PackedRows | None
    counts: Tensor
    places: TokenPositions | None
    predictors: Tensor
    scored: Tensor

    def on(self, device: torch.device) -> ModelInputs:
        """Return the inputs with the tensors that the model reads on a device."""
        return self._replace(
            tokens=to_device(self.tokens, device),
            positions=to_device(self.positions, device),
            counts=to_device(self.counts, device),
            predictors=to_device(self.predictors, device),
            scored=to_device(self.scored, device),
        )


def logit_positions(predictors: Tensor, num_tokens: int, cut: RankSlice) -> tuple[Tensor, Tensor]:
    """Choose the tokens that the last layer keeps.

    Ranks keep equally many tokens, at least one and a multiple of `cut.multiple`; the first token of a part
    is used as padding.

    Args:
        predictors: (N,) indices among T tokens.
        num_tokens: T.
        cut: This rank's slice of the tokens.

    Returns:
        The distinct predictors in this rank's part, (K,) indices in that part; and the index of each
        predictor among the kept tokens of all ranks in rank order, (N,).
    """
    size = num_tokens // cut.size

    # Rows that share a prompt also share the predictor of their first response token.
    chosen, number = predictors.unique(return_inverse=True)
    part = chosen // size
    counts = part.bincount(minlength=cut.size)

    # The ranks' outputs are gathered, which requires that all parts have the same length.
    most = rounded_up(max(1, int(counts.max())), cut.multiple)
    among = torch.arange(len(chosen)) + (torch.arange(cut.size) * most - (counts.cumsum(0) - counts))[part]
    own = chosen[part == cut.rank] - cut.rank * size

    return F.pad(own, (0, most - len(own))), among[number]


def packed_inputs(
    rows: ConcatenatedRows,
    share_prompts: bool,
    cut: RankSlice,
    place: RankSlice,
    device: torch.device,
    images: Sequence[ImagePlace] | None = None,
) -> ModelInputs:
    # For each row the first row with the same prompt; without sharing, the row itself.
    firsts: Sequence[int] = range(len(rows.prompts))
    if share_prompts:
        of_rows = zip(
            rows.ids.split((rows.prompts + rows.responses).tolist()), rows.prompts.tolist(), strict=True
        )
        firsts = first_with_prompt((tokens[:num_prompt] for tokens, num_prompt in of_rows), images)

    sources, prompt_places, response_places, lengths, prompt_of = _lay_out(
        rows.prompts.tolist(), rows.responses.tolist(), firsts, place.size
    )
    num_tokens = len(sources)

    # Every rank's part is padded to a multiple of the slice size. The padding is one more sequence, of which
    # all ranks have chunks.
    padding = (
        rounded_up(num_tokens, cut.unit if place.size == 1 else place.size * lcm(2, cut.unit)) - num_tokens
    )
    last = [padding] if padding else []

    # Positions in the packed sequence of the predictors inside responses, and of all tokens of the rows.
    in_response = response_places[rows.response_row] + rows.response_offset - 1
    prompts = rows.prompts[rows.row_of]
    places = rows.offset + torch.where(
        rows.offset < prompts, prompt_places[rows.row_of], response_places[rows.row_of] - prompts
    )
    packed = PackedRows([*lengths, *last], device, [*prompt_of, *(None for _ in last)], place)
    own = own_tokens(packed.lengths, place)
    sources = F.pad(sources, (0, padding), value=len(rows.ids))[own]

    # Map positions in the whole batch to indices of this rank's tokens; -1 for tokens of other ranks.
    here = torch.full((num_tokens + padding,), -1)
    here[own] = torch.arange(len(own))

    # A prompt token shared by several rows counts once for each of them.
    counts = torch.zeros(num_tokens + padding, dtype=torch.long).index_add_(0, places, rows.counts)

    # The first token of a response is predicted by the last prompt token, which may be elsewhere.
    predictors = here[
        torch.where(
            rows.response_offset == 0, prompt_places[rows.response_row] + rows.predictors, in_response
        )
    ]

    # This rank scores the tokens whose predictors it has.
    scored = (predictors >= 0).nonzero()[:, 0]

    return ModelInputs(
        tokens=F.pad(rows.ids, (0, 1))[sources][None],
        positions=F.pad(rows.offset, (0, 1))[sources][None],
        packed=packed,
        counts=counts[own][None],
        places=TokenPositions(sources, rows.prompts + rows.responses, rows.origins(firsts)),
        predictors=predictors[scored],
        scored=scored,
    )


def padded_inputs(rows: ConcatenatedRows, cut: RankSlice) -> ModelInputs:
    num_rows = len(rows.prompts)
    longest = rounded_up(int((rows.prompts + rows.responses).max()), cut.unit)

    # Zeros pad on the right, where the causal mask hides them from the real tokens.
    tokens = torch.zeros(num_rows, longest, dtype=torch.long)
    tokens[rows.row_of, rows.offset] = rows.ids
    counts = torch.zeros_like(tokens)
    counts[rows.row_of, rows.offset] = rows.counts
    predictors = rows.predictors * num_rows + rows.response_row  # hidden states are (S', b, H)

    return ModelInputs(
        tokens,
        torch.arange(longest).expand(num_rows, -1),
        None,
        counts,
        None,
        predictors,
        torch.arange(len(predictors)),
    )
