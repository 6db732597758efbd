"""Which tokens of a packed batch each of the ranks has that share its rows (context parallelism), and which
of them these attend to: pure.

Each sequence, padded to a multiple of 2 C, is cut into 2 C equal chunks, of which rank r of C has the chunks
r and 2 C - 1 - r: all ranks have as many tokens, and as many pairs of tokens that a causal mask leaves.
(Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class ContextParallelRank(NamedTuple):
    """Of a rank among those that share the tokens of its rows."""

    size: int
    rank: int


ALONE = ContextParallelRank(1, 0)


class QueryPiece(NamedTuple):
    """Neighbours among a rank's tokens, for its attention a sequence: `length` of them, from the rank's token
    `start` on.

    prompt, own: places in the whole batch of the keys that they see: all of `prompt`, and of `own` each as
    many as there are up to itself, the last one all.
    """

    start: int
    length: int
    prompt: range
    own: range

    @property
    def num_keys(self) -> int:
        return len(self.prompt) + len(self.own)


def _chunks(length: int, place: ContextParallelRank) -> list[range]:
    """Of a padded sequence, those of one rank."""
    if place.size == 1:
        return [range(length)]

    # An early chunk, whose tokens see few keys, is paired with a late one, whose tokens see many.
    chunk = length // (2 * place.size)
    return [
        range(number * chunk, (number + 1) * chunk)
        for number in (place.rank, 2 * place.size - 1 - place.rank)
    ]


def own_tokens(lengths: Sequence[int], place: ContextParallelRank) -> Tensor:
    """(T / C,) places in the whole batch of a rank's tokens, in its order. lengths: of the padded
    sequences."""
    starts = accumulate(lengths[:-1], initial=0)
    return torch.cat(
        [
            torch.arange(start + chunk.start, start + chunk.stop)
            for start, length in zip(starts, lengths, strict=True)
            for chunk in _chunks(length, place)
        ]
    )


def whole_order(lengths: Sequence[int], size: int) -> Tensor:
    """(T,) of each token of the whole batch its place where the ranks' tokens stand one rank's behind the
    other's."""
    return torch.cat([own_tokens(lengths, ContextParallelRank(size, rank)) for rank in range(size)]).argsort()


def pieces(lengths: Sequence[int], prompts: Sequence[range], place: ContextParallelRank) -> list[QueryPiece]:
    """Of one rank. lengths: of the padded sequences. prompts: of each sequence the places of the prompt that
    it continues, or none."""
    found = []
    start = 0

    # `start` counts the rank's own tokens, `begin` those of the whole batch.
    for begin, length, prompt in zip(accumulate(lengths[:-1], initial=0), lengths, prompts, strict=True):
        for chunk in _chunks(length, place):
            found.append(QueryPiece(start, len(chunk), prompt, range(begin, begin + chunk.stop)))
            start += len(chunk)

    return found
