"""Context parallelism: which tokens of a packed batch each rank has, and which keys they attend to. Pure.

Each sequence, padded to a multiple of 2 C, is split into 2 C equal chunks. Rank r of C has chunks r and 2 C -
1 - r, so that all ranks have equally many tokens and equally many pairs of tokens under a causal mask (Dubey
et al. 2024, The Llama 3 Herd of Models, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.config.batch_arithmetic import chunks_of_rank


class RankSlice(NamedTuple):
    """The number of ranks that share tokens, and this rank among them.

    Context-parallel ranks share those of each row, and sequence-parallel ones those of a micro-batch. Each
    rank's number of tokens is a multiple of `multiple`, which FP8 requires.
    """

    size: int
    rank: int
    multiple: int = 1

    @property
    def unit(self) -> int:
        """The number that the tokens of all ranks are padded to a multiple of."""
        return self.size * self.multiple


ALONE = RankSlice(1, 0)


class QueryPiece(NamedTuple):
    """Consecutive tokens of a rank that are one sequence for its attention.

    Attributes:
        start: The first token, counted among the rank's tokens.
        length: The number of tokens.
        prompt: Positions in the whole batch of prompt keys, all of which every token sees.
        own: Positions in the whole batch of the sequence's keys. Each token sees those up to itself, the last
            token all.
    """

    start: int
    length: int
    prompt: range
    own: range


def own_tokens(lengths: Sequence[int], place: RankSlice) -> Tensor:
    """Return the positions (T / C,) int64 in the whole batch of a rank's tokens, in its order.

    Args:
        lengths: The lengths of the padded sequences.
    """
    return torch.cat(
        [
            torch.arange(start + chunk.start, start + chunk.stop)
            for start, length in zip(accumulate(lengths[:-1], initial=0), lengths, strict=True)
            for chunk in chunks_of_rank(length, place.size, place.rank)
        ]
    )


def whole_order(lengths: Sequence[int], size: int) -> Tensor:
    """Return the position (T,) int64 of each token of the batch in the concatenation of the ranks' tokens."""
    return torch.cat([own_tokens(lengths, RankSlice(size, rank)) for rank in range(size)]).argsort()


def pieces(lengths: Sequence[int], prompts: Sequence[range], place: RankSlice) -> list[QueryPiece]:
    """Return the query pieces of one rank.

    Args:
        lengths: The lengths of the padded sequences.
        prompts: For each sequence, the positions of the prompt that it continues; empty if there is none.
    """
    found = []
    start = 0

    # `start` counts the rank's own tokens, `begin` those of the whole batch.
    for begin, length, prompt in zip(accumulate(lengths[:-1], initial=0), lengths, prompts, strict=True):
        for chunk in chunks_of_rank(length, place.size, place.rank):
            found.append(QueryPiece(start, len(chunk), prompt, range(begin, begin + chunk.stop)))
            start += len(chunk)

    return found
