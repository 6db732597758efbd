"""Context parallelism: each token is on one rank, all ranks have equal work, and keys match causal attention."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.batch_arithmetic import padded_length
from megarl.engine.context import ALONE, RankSlice, own_tokens, pieces, whole_order

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=8)
SIZES = st.integers(2, 5)


def test_by_hand() -> None:
    """The first of two ranks has the outer two of four chunks, the second the inner two."""
    assert own_tokens([8, 4], RankSlice(2, 0)).tolist() == [0, 1, 6, 7, 8, 11]
    assert own_tokens([8, 4], RankSlice(2, 1)).tolist() == [2, 3, 4, 5, 9, 10]
    assert own_tokens([3, 2], ALONE).tolist() == [0, 1, 2, 3, 4]
    assert [padded_length(length, 2) for length in (1, 4, 5)] == [4, 4, 8]
    assert padded_length(5, 1) == 5


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, size=SIZES)
def test_every_token_is_on_one_rank_and_all_have_the_same_work(lengths: list[int], size: int) -> None:
    lengths = [padded_length(length, size) for length in lengths]
    owned = [own_tokens(lengths, RankSlice(size, rank)) for rank in range(size)]
    assert torch.cat(owned)[whole_order(lengths, size)].tolist() == list(range(sum(lengths)))
    assert len({len(own) for own in owned}) == 1
    offset = torch.cat([torch.arange(length) for length in lengths])
    assert len({int((offset[own] + 1).sum()) for own in owned}) == 1  # pairs of a query and a key


def tokens_of_te(boundaries: list[int], size: int, rank: int) -> list[int]:
    """Return the tokens of a rank as Transformer Engine's ring expects them (its thd_get_partitioned_indices).

    A rank has `1 / size` of each sequence: the first half of its part is chunk `rank` of the sequence, the
    second half is as far from the sequence's end.
    """
    found = []
    for local in range(boundaries[-1] // size):
        (sequence,) = [
            number
            for number in range(len(boundaries) - 1)
            if boundaries[number] <= local * size < boundaries[number + 1]
        ]
        begin, end = boundaries[sequence], boundaries[sequence + 1]
        half = (end - begin) // size // 2
        within = local - begin // size
        found.append(begin + rank * half + within if within < half else end - (rank + 2) * half + within)
    return found


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, size=SIZES)
def test_transformer_engines_ring_finds_the_tokens_where_it_expects_them(
    lengths: list[int], size: int
) -> None:
    lengths = [padded_length(length, size) for length in lengths]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for rank in range(size):
        expected = tokens_of_te(boundaries, size, rank)
        assert own_tokens(lengths, RankSlice(size, rank)).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, size=st.integers(1, 5), prompt=st.integers(0, 7))
def test_pieces_see_what_stands_before_them(lengths: list[int], size: int, prompt: int) -> None:
    """The first sequence is a prompt that the others continue. At most `prompt` of its tokens are padding."""
    lengths = [padded_length(length, size) for length in lengths]
    real = range(max(1, lengths[0] - prompt))
    prompts = [range(0), *(real for _ in lengths[1:])]
    begins = torch.tensor([0, *lengths[:-1]]).cumsum(0).repeat_interleave(torch.tensor(lengths))

    for rank in range(size):
        place = RankSlice(size, rank)
        own = own_tokens(lengths, place).tolist()
        found = pieces(lengths, prompts, place)
        assert [piece.start for piece in found] == torch.tensor(
            [0, *(piece.length for piece in found)]
        ).cumsum(0)[:-1].tolist()
        seen = {
            own[piece.start + index]: [*piece.prompt, *piece.own[: len(piece.own) - piece.length + index + 1]]
            for piece in found
            for index in range(piece.length)
        }
        for token, keys in seen.items():
            of_prompt = [] if token < lengths[0] else list(real)
            assert keys == [*of_prompt, *range(int(begins[token]), token + 1)]
