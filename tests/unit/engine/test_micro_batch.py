"""Micro-batches against positions, predictors and targets worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.schema import Device
from tests.ranks import RankPool

# P = 3, R = 3. MappingRow 0: prompt 5 6, response 7 8. MappingRow 1: prompt 1 2 3, response 4. 9 stands where
# there is no token.
BATCH = {
    "input_ids": torch.tensor([[9, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]),
    "position_ids": torch.tensor([[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]),
    "prompts": torch.tensor([[9, 5, 6], [1, 2, 3]]),
    "responses": torch.tensor([[7, 8, 9], [4, 9, 9]]),
    "response_mask": torch.tensor([[True, True, False], [True, False, False]]),
    "advantages": torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]),
    "uid_number": torch.tensor([3, 4]),  # (B,): not per token, so not for the loss
}

# Rows 0 and 2 have the prompt 5 6, which is padded with other tokens, and row 3 has it without a response.
ONE_PROMPT = {
    "input_ids": torch.tensor(
        [[9, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9], [0, 5, 6, 4, 3, 2], [7, 5, 6, 1, 1, 1]]
    ),
    "attention_mask": torch.tensor(
        [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]
    ),
    "response_mask": torch.tensor(
        [[True, True, False], [True, False, False], [True, True, True], [False] * 3]
    ),
}


def make(
    batch: dict[str, Tensor],
    rows: list[int],
    packing: bool,
    share_prompts: bool,
    ends: bool,
    cut: tuple[int, int],
    place: tuple[int, int],
) -> dict[str, Any]:
    """In a rank: the micro-batch as plain values."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.context import ContextParallelRank
    from megarl.engine.micro_batch import SequenceSlice, make_micro_batch

    options = {"packing": packing, "share_prompts": share_prompts, "ends_with_predictors": ends}
    made = make_micro_batch(
        batch,
        rows,
        device=torch.device("cpu"),
        cut=SequenceSlice(*cut),
        place=ContextParallelRank(*place),
        **options,
    )
    plain = {
        key: getattr(made, key).tolist()
        for key in ("tokens", "positions", "counts", "predictors", "targets", "cells")
    }
    assert made.num_counted == made.counts.sum()

    if made.packed is not None:
        plain["boundaries"] = made.packed.cu_seqlens_q.tolist()
        plain["longest"] = made.packed.max_seqlen_kv
        plain["prompt_of"] = made.packed.shared and made.packed.shared.prompt_of
        plain["predicting"] = None if made.packed.predicting is None else made.packed.predicting.tolist()

    plain["rows"] = {key: value.tolist() for key, value in made.rows.items()}
    plain["scattered"] = made.scatter(torch.arange(1.0, len(made.cells) + 1)).tolist()
    return plain


def made(
    rank_pool: RankPool,
    *,
    rows: list[int],
    packing: bool,
    share_prompts: bool = True,  # of other prompts there is nothing to share
    ends: bool = False,
    cut: tuple[int, int] = (1, 0),
    place: tuple[int, int] = (1, 0),
    batch: dict[str, Tensor] = BATCH,
) -> dict[str, Any]:
    options = {"packing": packing, "share_prompts": share_prompts, "ends": ends, "cut": cut, "place": place}
    (got,) = rank_pool.run(make, world_size=1, batch=batch, rows=rows, **options)
    return got


def test_ranks_that_share_rows(rank_pool: RankPool) -> None:
    """Of four chunks of each row the first rank has the outer two, the second the inner two: here chunks of a
    token, and no padding."""
    outer, inner = (made(rank_pool, rows=[0, 1], packing=True, place=(2, rank)) for rank in range(2))
    assert outer["tokens"] == [[5, 8, 1, 4]]
    assert outer["positions"] == [[0, 3, 0, 3]]

    # a last token predicts nothing here
    assert outer["predictors"] == outer["targets"] == outer["cells"] == []
    assert outer["scattered"] == [[0.0] * 3] * 2
    assert inner["tokens"] == [[6, 7, 2, 3]]
    assert inner["positions"] == [[1, 2, 1, 2]]
    assert inner["predictors"] == [0, 1, 3]
    assert inner["targets"] == [7, 8, 4]
    assert inner["boundaries"] == outer["boundaries"] == [0, 4, 8]  # of the whole rows
    assert inner["rows"] == outer["rows"]


def test_what_pads_the_parts_of_ranks_that_share_rows(rank_pool: RankPool) -> None:
    """Each row is padded to 6 tokens, and the whole to 18, so that each of three ranks has a multiple of
    3."""
    third = made(rank_pool, rows=[0, 1], packing=True, place=(3, 0), cut=(3, 0))
    assert third["boundaries"] == [0, 6, 12, 18]
    assert third["tokens"] == [[5, 0, 1, 0, 0, 0]]
    assert third["positions"] == [[0, 0, 0, 0, 0, 0]]


def test_ranks_that_share_rows_and_a_prompt(rank_pool: RankPool) -> None:
    """The prompt 1 2 3 and the responses 4 and 7 8 are cut each by itself: a response's first token is
    predicted by the prompt's last."""
    batch = {
        **BATCH,
        "input_ids": torch.tensor([[1, 2, 3, 7, 8, 9], [1, 2, 3, 4, 9, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]),
    }
    outer, inner = (
        made(rank_pool, rows=[0, 1], packing=True, place=(2, rank), batch=batch) for rank in range(2)
    )
    assert outer["tokens"] == [[1, 0, 7, 0, 4, 0]]
    assert outer["counts"] == [[2, 0, 1, 0, 1, 0]]  # what pads never counts
    assert inner["tokens"] == [[2, 3, 8, 0, 0, 0]]
    assert inner["counts"] == [[2, 2, 1, 0, 0, 0]]
    assert inner["positions"] == [[1, 2, 4, 0, 0, 0]]
    assert (outer["targets"], outer["predictors"], outer["cells"]) == ([8], [2], [1])
    assert (inner["targets"], inner["predictors"], inner["cells"]) == ([7, 4], [1, 1], [0, 3])


def test_ranks_cannot_share_rows_that_are_not_packed(rank_pool: RankPool) -> None:
    with pytest.raises(
        AssertionError, match="context_parallel_size 2 cuts rows that are packed: use engine.packing=true"
    ):
        made(rank_pool, rows=[0, 1], packing=False, place=(2, 0))


def test_packed(rank_pool: RankPool) -> None:
    got = made(rank_pool, rows=[0, 1], packing=True)
    assert got["tokens"] == [[5, 6, 7, 8, 1, 2, 3, 4]]
    assert got["positions"] == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert got["boundaries"] == [0, 4, 8]
    assert got["longest"] == 4
    assert got["predictors"] == [1, 2, 6]  # 6 predicts 7, 7 predicts 8; 3 predicts 4
    assert got["targets"] == [7, 8, 4]
    assert got["cells"] == [0, 1, 3]
    assert got["scattered"] == [[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]
    assert got["rows"] == {
        "response_mask": [[True, True, False], [True, False, False]],
        "advantages": BATCH["advantages"].tolist(),
    }


def test_packed_rows_in_another_order(rank_pool: RankPool) -> None:
    got = made(rank_pool, rows=[1, 0], packing=True)
    assert got["tokens"] == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert got["predictors"] == [2, 5, 6]
    assert got["targets"] == [4, 7, 8]
    assert got["scattered"] == [[1.0, 0.0, 0.0], [2.0, 3.0, 0.0]]
    assert got["rows"]["advantages"] == BATCH["advantages"][[1, 0]].tolist()


def test_rows_of_one_prompt_share_it(rank_pool: RankPool) -> None:
    got = made(rank_pool, rows=[0, 1, 2, 3], packing=True, cut=(7, 0), batch=ONE_PROMPT)
    assert got["tokens"] == [[5, 6, 7, 8, 4, 3, 2, 1, 2, 3, 4, 0, 0, 0]]
    assert got["positions"] == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]]
    assert got["counts"] == [[2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]]  # in row 3 the loss reads nothing
    assert got["boundaries"] == [0, 2, 4, 7, 11, 14]
    assert got["prompt_of"] == [None, 0, 0, None, None]
    assert got["longest"] == 5  # for angles: the last of row 2
    assert got["predictors"] == [1, 2, 9, 1, 4, 5]  # the prompt's last token predicts both first ones
    assert got["targets"] == [7, 8, 4, 4, 3, 2]
    assert got["cells"] == [0, 1, 3, 6, 7, 8]
    apart = made(rank_pool, rows=[0, 1, 2, 3], packing=True, share_prompts=False, batch=ONE_PROMPT)
    assert apart["boundaries"] == [0, 4, 8, 13, 15]
    assert apart["predictors"] == [1, 2, 6, 9, 10, 11]


def test_the_last_layer_ends_with_what_predicts(rank_pool: RankPool) -> None:
    """Above, the tokens 1, 2, 4, 5 and 9 predict one, 1 two of them. Over two ranks the 12 tokens are cut
    behind token 5, and the second, which has token 9 alone, goes on with as many as the first: its own first
    token stands in three times."""
    one = made(rank_pool, rows=[0, 1, 2, 3], packing=True, ends=True, batch=ONE_PROMPT)
    assert one["predicting"] == [1, 2, 4, 5, 9]
    assert one["predictors"] == [0, 1, 4, 0, 2, 3]
    first, second = (
        made(rank_pool, rows=[0, 1, 2, 3], packing=True, ends=True, cut=(2, rank), batch=ONE_PROMPT)
        for rank in range(2)
    )
    assert first["predicting"] == [1, 2, 4, 5]
    assert second["predicting"] == [3, 0, 0, 0]
    assert first["predictors"] == second["predictors"] == [0, 1, 4, 0, 2, 3]
    assert first["targets"] == second["targets"] == one["targets"] == [7, 8, 4, 4, 3, 2]

    # padded: as it was
    assert made(rank_pool, rows=[0, 1], packing=False, ends=True)["predictors"] == [2, 4, 5]


def test_a_rank_that_predicts_nothing_goes_on_with_a_token(rank_pool: RankPool) -> None:
    outer, inner = (
        made(rank_pool, rows=[0, 1], packing=True, ends=True, place=(2, rank)) for rank in range(2)
    )
    assert (outer["predicting"], outer["predictors"]) == ([0], [])
    assert (inner["predicting"], inner["predictors"]) == ([0, 1, 3], [0, 1, 2])


def test_packed_and_aligned(rank_pool: RankPool) -> None:
    """The padding is a sequence of its own at the end, so no real token attends to it."""
    got = made(rank_pool, rows=[0, 1], packing=True, cut=(3, 0))
    assert got["tokens"] == [[5, 6, 7, 8, 1, 2, 3, 4, 0]]
    assert got["boundaries"] == [0, 4, 8, 9]
    assert got["predictors"] == [1, 2, 6]
    assert made(rank_pool, rows=[0, 1], packing=True, cut=(4, 0))["boundaries"] == [0, 4, 8]


def test_padded(rank_pool: RankPool) -> None:
    """Places are those of sequence-major hidden states (S', b): position 2 of row 0 is place 2 * 2 + 0."""
    got = made(rank_pool, rows=[0, 1], packing=False, cut=(3, 0))
    assert got["tokens"] == [[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 0, 0]]
    assert got["positions"] == [[0, 1, 2, 3, 4, 5]] * 2
    assert got["counts"] == [[1, 1, 1, 1, 0, 0]] * 2
    assert got["predictors"] == [2, 4, 5]
    assert got["targets"] == [7, 8, 4]
    assert got["cells"] == [0, 1, 3]
    assert "boundaries" not in got


def test_masked_response_tokens_are_scored_all_the_same(rank_pool: RankPool) -> None:
    """What a tool wrote is context and is scored; `response_mask` only goes to the loss."""
    batch = {**BATCH, "response_mask": torch.tensor([[False, True, False], [True, False, False]])}
    assert made(rank_pool, rows=[0, 1], packing=True, batch=batch)["targets"] == [7, 8, 4]


def test_a_row_without_a_response(rank_pool: RankPool) -> None:
    batch = {**BATCH, "attention_mask": torch.tensor([[0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])}
    got = made(rank_pool, rows=[0, 1], packing=True, batch=batch)
    assert got["tokens"] == [[5, 6, 1, 2, 3, 4]]
    assert got["predictors"] == [4]
    assert got["scattered"] == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([0, 0, 0, 1, 1, 0], "0 prompt and 2 response"),
        ([1, 1, 0, 1, 1, 0], "2 prompt and 2 response"),  # padded on the right
        ([0, 1, 1, 0, 1, 1], "2 prompt and 2 response"),  # a gap after the prompt
        ([1, 0, 1, 1, 0, 0], "2 prompt and 1 response"),
    ],
)
def test_wrong_padding_names_the_row(mask: list[int], says: str, rank_pool: RankPool) -> None:
    batch = {**BATCH, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], mask])}
    with pytest.raises(AssertionError, match=f"ValueError: row 1 of the batch: attention_mask has {says}"):
        made(rank_pool, rows=[0, 1], packing=True, batch=batch)
