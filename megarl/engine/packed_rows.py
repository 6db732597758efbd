"""The sequences of a packed batch and their attention calls, planned on the host per micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.config.batch_arithmetic import padded_length
from megarl.engine.context import ALONE, QueryPiece, RankSlice, pieces, whole_order
from megarl.engine.platform import to_device
from megarl.engine.shared_prompts import Sequences, sequences_of, shared_prompts

# The overhead of an attention call, in pairs of tokens. Sequences share a padded call if that costs less.
CALL_COST = 1024


class PackedRows(PackedSeqParams):
    """The boundaries of the sequences in a packed batch.

    They are kept on the device, as Megatron's layers require, and on the host, so that no layer has to read
    them from the device. Padding at the end of the batch is an additional sequence.

    Attributes:
        lengths: The length of each sequence, including the padding for context parallelism.
        prompts: For each sequence, the positions in the batch of the prompt that it continues.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        prompt_of: Sequence[int | None] | None = None,
        place: RankSlice = ALONE,
    ) -> None:
        """Create the boundaries.

        Args:
            prompt_of: For each sequence, the number of the sequence that it continues, or None (see
                `shared_prompts`).
            place: This rank among those that share the rows. Each sequence is then padded separately (see
                `context`).
        """
        self.lengths = [padded_length(length, place.size) for length in lengths]
        assert min(self.lengths) > 0, "a packed batch holds no empty sequence"
        self.place = place

        # (K,) indices of this rank's tokens that the last layer keeps (see micro_batch.py).
        self.predicting: Tensor | None = None
        # Features that the first layers add to image tokens (see vision.py).
        self.deepstack: Deepstack | None = None
        self.delta_rows: Any = None  # a DeltaRows, made by the first gated delta net
        self.sparse_rows: Any = None  # a SparseRows, made by the first layer with sparse attention
        prompt_of = prompt_of or [None] * len(lengths)
        self.shares_prompts = any(prompt is not None for prompt in prompt_of)
        starts = [0, *accumulate(self.lengths)]
        boundaries = to_device(torch.tensor(starts, dtype=torch.int32), device)

        # For each sequence, the positions of the prompt that its tokens see as well.
        self.prompts = prompts = [
            range(0) if prompt is None else range(starts[prompt], starts[prompt] + lengths[prompt])
            for prompt in prompt_of
        ]
        self.pieces = pieces(self.lengths, prompts, place)

        # The order of the keys takes time on the host, so only a batch that needs it pays for it.
        key_order = whole_order(self.lengths, place.size) if self.shares_prompts and place.size > 1 else None
        self.shared = shared_prompts(self.pieces, key_order, device)
        longest = max(self.lengths)

        # The largest position, since a response continues where its prompt ends.
        furthest = max(map(add, map(len, prompts), self.lengths))
        super().__init__(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=furthest,
        )

    @cached_property
    def attention_plan(self) -> AttentionPlan:
        """The plan of the attention calls, which is made once per micro-batch and cached for all layers.

        Padding repeats the last token of a piece. It comes after all real tokens, so that causal attention
        hides it from them; its outputs are dropped, so that its gradient is zero.
        """
        calls: list[AttentionCall] = []
        gathered = []
        gathered_keys = []
        real = []

        for members in _share_calls(self.pieces):
            first = members[0]
            length = max(piece.length for piece in members)
            # One column per property of the pieces, to be broadcast against token offsets.
            starts, lengths, prompts, own = torch.tensor(
                [(piece.start, piece.length, piece.prompt.start, piece.own.start) for piece in members]
            ).T[..., None]
            offset = torch.arange(length)
            num_own = len(first.own) - first.length
            within = torch.minimum(offset, lengths - 1)
            # A piece sees its prompt, its sequence up to its first query, and its own tokens.
            keys = [
                prompts + torch.arange(len(first.prompt)),
                own + torch.arange(num_own),
                own + num_own + within,
            ]
            gathered.append((starts + within).flatten())
            gathered_keys.append(torch.cat(keys, dim=1).flatten())
            real.append((offset < lengths).flatten())
            calls.append((len(members), length, len(first.prompt) + num_own))

        gather = torch.cat(gathered)
        gather_keys = torch.cat(gathered_keys)
        is_real = torch.cat(real)
        tokens = torch.arange(sum(self.lengths) // self.place.size)
        size = self.place.size

        # The keys are in rank order, as `whole_keys` gathers them.
        if size > 1:
            gather_keys = whole_order(self.lengths, size)[gather_keys]
        elif torch.equal(gather, tokens) and not any(before for _, _, before in calls):
            # The tokens are already in the right order, so no copy is needed.
            return calls, None, None, None

        # The inverse of `gather` for real tokens.
        scatter = torch.empty_like(tokens)
        scatter[gather[is_real]] = is_real.nonzero()[:, 0]
        device = self.cu_seqlens_q.device
        gather, gather_keys, scatter = (to_device(index, device) for index in (gather, gather_keys, scatter))

        return calls, gather, gather_keys, scatter

    @cached_property
    def key_places(self) -> tuple[Tensor, Sequences]:
        """The keys that pieces see, concatenated piece by piece, and the pieces as sequences of one call.

        The first is (N,) on the device, the position of each key among the keys of all ranks, which are in
        rank order. Both are determined once per micro-batch and cached.
        """
        device = self.cu_seqlens_q.device
        # The keys are gathered in rank order, so positions in the batch are translated.
        order = whole_order(self.lengths, self.place.size)
        places = torch.cat(
            [
                torch.arange(seen.start, seen.stop)
                for piece in self.pieces
                for seen in (piece.prompt, piece.own)
            ]
        )
        queries = [piece.length for piece in self.pieces]
        keys = [len(piece.prompt) + len(piece.own) for piece in self.pieces]
        return to_device(order[places], device), sequences_of(queries, keys, device)


# Features of images that layers of the language model add to their outputs: (D, N, H), of layer d for this
# rank's N image tokens; and (N,) the positions of these tokens among those of this rank.
Deepstack = tuple[Tensor, Tensor]


# Pieces that are padded to one length and attended in one call: their number; the padded number of queries of
# each; and the number of keys that all tokens of a piece see, from its prompt and its own sequence.
AttentionCall = tuple[int, int, int]


# The calls that attend a rank's T tokens of a packed batch; (N,) indices of the tokens of all calls, N - T of
# which are padding; indices of the keys that they see, including prompts, among the keys of all ranks; and
# (T,) the position of each token in the first. The tensors are None if tokens are in the order of the calls.
AttentionPlan = tuple[list[AttentionCall], Tensor | None, Tensor | None, Tensor | None]


def _share_calls(every: list[QueryPiece]) -> list[list[QueryPiece]]:
    """Group pieces into calls.

    Sorted by length, longest first, a piece joins the previous call of pieces with equally many common keys,
    unless padding it costs more than a call.
    """
    by_keys: dict[tuple[int, int], list[QueryPiece]] = defaultdict(list)
    for piece in sorted(every, key=lambda piece: -piece.length):
        by_keys[len(piece.prompt), len(piece.own) - piece.length].append(piece)
    calls: list[list[QueryPiece]] = []

    for members in by_keys.values():
        calls.append([members[0]])
        for piece in members[1:]:
            # The work of causal attention, and so the cost of padding, grows with the square of the length.
            if calls[-1][0].length ** 2 - piece.length**2 <= CALL_COST:
                calls[-1].append(piece)
            else:
                calls.append([piece])

    # In batch order, so that tokens need not be moved if no padding is needed.
    return sorted(sorted(members) for members in calls)
