"""Micro-batches against positions, predictors and targets worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import Device
from tests.ranks import RankPool


def rows_of(
    prompts: list[list[int]], responses: list[list[int]], **columns: list[list[Any]]
) -> dict[str, RaggedTensor]:
    """Return a batch. The model generated all of the responses, unless `response_mask` is given."""
    wrote = {"response_mask": [[True] * len(response) for response in responses]}
    dtypes = {"response_mask": torch.bool, "advantages": torch.float32, "routed_experts": torch.uint8}

    return {
        "prompts": RaggedTensor.of_rows(prompts, torch.int32, padding=9, on_left=True),
        "responses": RaggedTensor.of_rows(responses, torch.int32, padding=9),
        **{key: RaggedTensor.of_rows(rows, dtypes[key]) for key, rows in (wrote | columns).items()},
    }


BATCH = rows_of(
    [[5, 6], [1, 2, 3]],
    [[7, 8], [4]],
    advantages=[[0.1, 0.2], [0.4]],
    routed_experts=[[1] * 6, [2] * 6],  # not per response token, so not for the loss
)
# Rows 0 and 2 have the prompt 5 6, and row 3 has it without a response.
ONE_PROMPT = rows_of([[5, 6], [1, 2, 3], [5, 6], [5, 6]], [[7, 8], [4], [4, 3, 2], []])


def make(
    batch: dict[str, RaggedTensor],
    rows: list[int],
    packing: bool,
    share_prompts: bool,
    ends: bool,
    cut: tuple[int, ...],
    place: tuple[int, int],
) -> dict[str, Any]:
    """Run in a rank: return the micro-batch as plain values."""
    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine.context import RankSlice
    from megarl.engine.micro_batch import make_micro_batch

    options = {"packing": packing, "share_prompts": share_prompts, "ends_with_predictors": ends}
    made = make_micro_batch(
        batch,
        rows,
        device=torch.device("cpu"),
        cut=RankSlice(*cut),
        place=RankSlice(*place),
        **options,
    )
    inputs = made.inputs
    plain = {key: getattr(inputs, key).tolist() for key in ("tokens", "positions", "counts", "scored")}
    plain |= {key: getattr(made, key).tolist() for key in ("predictors", "targets", "cells")}
    assert made.num_counted == inputs.counts.sum()
    if not ends:
        assert made.predictors.tolist() == inputs.predictors.tolist()

    if (packed := inputs.packed) is not None:
        plain["boundaries"] = packed.cu_seqlens_q.tolist()
        plain["longest"] = packed.max_seqlen_kv
        plain["prompts"] = list(map(list, packed.prompts))
        plain["predicting"] = None if packed.predicting is None else packed.predicting.tolist()

    plain["rows"] = {key: value.tolist() for key, value in made.rows.items()}
    whole = made.of_all_tokens(torch.arange(1.0, len(inputs.scored) + 1))
    plain["whole"] = whole.tolist()
    plain["scattered"] = made.padded(whole).tolist()
    return plain


def made(
    rank_pool: RankPool,
    *,
    rows: list[int],
    packing: bool,
    share_prompts: bool = True,  # different prompts have nothing to share
    ends: bool = False,
    cut: tuple[int, ...] = (1, 0),
    place: tuple[int, int] = (1, 0),
    batch: dict[str, RaggedTensor] = BATCH,
) -> dict[str, Any]:
    options = {"packing": packing, "share_prompts": share_prompts, "ends": ends, "cut": cut, "place": place}
    (got,) = rank_pool.run(make, world_size=1, batch=batch, rows=rows, **options)
    return got


def test_ranks_that_share_rows(rank_pool: RankPool) -> None:
    """The first rank has the outer two of four chunks of each row, the second the inner two.

    Chunks have one token here, and there is no padding.
    """
    outer, inner = (made(rank_pool, rows=[0, 1], packing=True, place=(2, rank)) for rank in range(2))
    assert outer["tokens"] == [[5, 8, 1, 4]]
    assert outer["positions"] == [[0, 3, 0, 3]]

    # the last token predicts nothing here
    assert outer["predictors"] == outer["targets"] == outer["scored"] == []
    assert outer["whole"] == [0.0] * 3
    assert outer["scattered"] == [[0.0] * 2] * 2
    assert inner["tokens"] == [[6, 7, 2, 3]]
    assert inner["positions"] == [[1, 2, 1, 2]]
    assert inner["predictors"] == [0, 1, 3]
    assert inner["targets"] == [7, 8, 4]
    assert inner["boundaries"] == outer["boundaries"] == [0, 4, 8]  # those of the whole rows
    assert inner["rows"] == outer["rows"]


def test_parts_of_context_parallel_ranks_are_padded(rank_pool: RankPool) -> None:
    """Each row is padded to 6 tokens, and the batch to 18, so that each of three ranks has a multiple of 3."""
    third = made(rank_pool, rows=[0, 1], packing=True, place=(3, 0), cut=(3, 0))
    assert third["boundaries"] == [0, 6, 12, 18]
    assert third["tokens"] == [[5, 0, 1, 0, 0, 0]]
    assert third["positions"] == [[0, 0, 0, 0, 0, 0]]


def test_ranks_that_share_rows_and_a_prompt(rank_pool: RankPool) -> None:
    """The prompt 1 2 3 and the responses 4 and 7 8 are split separately.

    The first token of a response is predicted by the prompt's last.
    """
    batch = rows_of([[1, 2, 3], [1, 2, 3]], [[7, 8], [4]])
    outer, inner = (
        made(rank_pool, rows=[0, 1], packing=True, place=(2, rank), batch=batch) for rank in range(2)
    )
    assert outer["tokens"] == [[1, 0, 7, 0, 4, 0]]
    assert outer["counts"] == [[2, 0, 1, 0, 1, 0]]  # padding never counts
    assert inner["tokens"] == [[2, 3, 8, 0, 0, 0]]
    assert inner["counts"] == [[2, 2, 1, 0, 0, 0]]
    assert inner["positions"] == [[1, 2, 4, 0, 0, 0]]
    assert (outer["targets"], outer["predictors"], outer["scored"]) == ([8], [2], [1])
    assert (inner["targets"], inner["predictors"], inner["scored"]) == ([7, 4], [1, 1], [0, 2])
    assert inner["cells"] == outer["cells"] == [0, 1, 2]  # those of all response tokens
    assert (outer["whole"], inner["whole"]) == ([0.0, 1.0, 0.0], [1.0, 0.0, 2.0])


def test_ranks_cannot_share_rows_that_are_not_packed(rank_pool: RankPool) -> None:
    with pytest.raises(
        AssertionError, match="context_parallel_size 2 splits packed rows: use engine.packing=true"
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
    assert got["scored"] == [0, 1, 2]
    assert got["cells"] == [0, 1, 2]  # two rows of two cells, the last of which is padding
    assert got["scattered"] == [[1.0, 2.0], [3.0, 0.0]]
    assert got["rows"] == {
        "response_mask": [[True, True], [True, False]],
        "advantages": BATCH["advantages"].padded().tolist(),
    }


def test_packed_rows_in_another_order(rank_pool: RankPool) -> None:
    got = made(rank_pool, rows=[1, 0], packing=True)
    assert got["tokens"] == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert got["predictors"] == [2, 5, 6]
    assert got["targets"] == [4, 7, 8]
    assert got["scattered"] == [[1.0, 0.0], [2.0, 3.0]]
    assert got["rows"]["advantages"] == BATCH["advantages"].padded()[[1, 0]].tolist()


def test_rows_of_one_prompt_share_it(rank_pool: RankPool) -> None:
    got = made(rank_pool, rows=[0, 1, 2, 3], packing=True, cut=(7, 0), batch=ONE_PROMPT)
    assert got["tokens"] == [[5, 6, 7, 8, 4, 3, 2, 1, 2, 3, 4, 0, 0, 0]]
    assert got["positions"] == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 2, 3, 0, 0, 0]]
    assert got["counts"] == [[2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]]  # the loss reads nothing in row 3
    assert got["boundaries"] == [0, 2, 4, 7, 11, 14]
    assert got["prompts"] == [[], [0, 1], [0, 1], [], []]
    assert got["longest"] == 5  # for RoPE: the last of row 2
    assert got["predictors"] == [1, 2, 9, 1, 4, 5]  # the prompt's last token predicts both first ones
    assert got["targets"] == [7, 8, 4, 4, 3, 2]
    assert got["cells"] == [0, 1, 3, 6, 7, 8]
    apart = made(rank_pool, rows=[0, 1, 2, 3], packing=True, share_prompts=False, batch=ONE_PROMPT)
    assert apart["boundaries"] == [0, 4, 8, 13, 15]
    assert apart["predictors"] == [1, 2, 6, 9, 10, 11]


def test_the_last_layer_ends_with_what_predicts(rank_pool: RankPool) -> None:
    """The tokens 1, 2, 4, 5 and 9 above predict another one, 1 predicts two.

    Over two ranks, the 12 tokens are split after token 5. The second rank, which has only token 9 of them,
    keeps as many as the first: its first token is repeated three times.
    """
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

    # Padded: unchanged.
    assert made(rank_pool, rows=[0, 1], packing=False, ends=True)["predictors"] == [2, 4, 5]


def test_a_rank_that_predicts_nothing_goes_on_with_a_token(rank_pool: RankPool) -> None:
    outer, inner = (
        made(rank_pool, rows=[0, 1], packing=True, ends=True, place=(2, rank)) for rank in range(2)
    )
    assert (outer["predicting"], outer["predictors"]) == ([0], [])
    assert (inner["predicting"], inner["predictors"]) == ([0, 1, 3], [0, 1, 2])


def test_packed_and_aligned(rank_pool: RankPool) -> None:
    """The padding is a separate sequence at the end, so no real token attends to it."""
    got = made(rank_pool, rows=[0, 1], packing=True, cut=(3, 0))
    assert got["tokens"] == [[5, 6, 7, 8, 1, 2, 3, 4, 0]]
    assert got["boundaries"] == [0, 4, 8, 9]
    assert got["predictors"] == [1, 2, 6]
    assert made(rank_pool, rows=[0, 1], packing=True, cut=(4, 0))["boundaries"] == [0, 4, 8]


def test_parts_of_ranks_are_multiples(rank_pool: RankPool) -> None:
    """FP8 needs multiples of tokens in every layer, also in the last one, which keeps those that predict."""
    alone = made(rank_pool, rows=[0, 1, 2, 3], packing=True, ends=True, cut=(1, 0, 8), batch=ONE_PROMPT)
    assert len(alone["tokens"][0]) == 16
    assert alone["predicting"] == [1, 2, 4, 5, 9, 0, 0, 0]
    assert alone["predictors"] == [0, 1, 4, 0, 2, 3]
    second = made(rank_pool, rows=[0, 1, 2, 3], packing=True, ends=True, cut=(2, 1, 4), batch=ONE_PROMPT)
    assert second["predicting"] == [1, 0, 0, 0]
    assert second["predictors"] == alone["predictors"]

    # Ranks that share rows have two chunks each; padded rows are all longer.
    shared = made(rank_pool, rows=[0, 1], packing=True, place=(2, 0), cut=(1, 0, 8))
    assert len(shared["tokens"][0]) == 8
    padded = made(rank_pool, rows=[0, 1], packing=False, cut=(1, 0, 8))
    assert [len(row) for row in padded["tokens"]] == [8, 8]


def test_padded(rank_pool: RankPool) -> None:
    """Indices refer to sequence-major hidden states (S', b): position 2 of row 0 is index 2 * 2 + 0."""
    got = made(rank_pool, rows=[0, 1], packing=False, cut=(3, 0))
    assert got["tokens"] == [[5, 6, 7, 8, 0, 0], [1, 2, 3, 4, 0, 0]]
    assert got["positions"] == [[0, 1, 2, 3, 4, 5]] * 2
    assert got["counts"] == [[1, 1, 1, 1, 0, 0]] * 2
    assert got["predictors"] == [2, 4, 5]
    assert got["targets"] == [7, 8, 4]
    assert got["cells"] == [0, 1, 2]
    assert "boundaries" not in got


def test_masked_response_tokens_are_scored_all_the_same(rank_pool: RankPool) -> None:
    """Tool output is context and is scored; `response_mask` only goes to the loss."""
    batch = rows_of([[5, 6], [1, 2, 3]], [[7, 8], [4]], response_mask=[[False, True], [True]])
    got = made(rank_pool, rows=[0, 1], packing=True, batch=batch)
    assert got["targets"] == [7, 8, 4]
    assert got["rows"]["response_mask"] == [[False, True], [True, False]]


def test_a_row_without_a_response(rank_pool: RankPool) -> None:
    batch = rows_of([[5, 6], [1, 2, 3]], [[], [4]])
    got = made(rank_pool, rows=[0, 1], packing=True, batch=batch)
    assert got["tokens"] == [[5, 6, 1, 2, 3, 4]]
    assert got["counts"] == [[0, 0, 1, 1, 1, 1]]
    assert got["predictors"] == [4]
    assert got["scattered"] == [[0.0], [1.0]]


def test_rows_of_which_none_has_a_response(rank_pool: RankPool) -> None:
    got = made(rank_pool, rows=[0, 1], packing=False, batch=rows_of([[5, 6], [1]], [[], []]))
    assert got["tokens"] == [[5, 6], [1, 0]]
    assert got["predictors"] == got["whole"] == []
    assert got["scattered"] == got["rows"]["response_mask"] == [[], []]


def test_a_row_without_a_prompt_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="ValueError: row 1 of the batch has no prompt"):
        made(rank_pool, rows=[0, 1], packing=True, batch=rows_of([[5], []], [[7], [4]]))


def test_a_column_of_other_tokens_is_refused(rank_pool: RankPool) -> None:
    batch = rows_of([[5, 6], [1, 2, 3]], [[7, 8], [4]], advantages=[[0.1, 0.2], [0.3, 0.4]])
    with pytest.raises(
        AssertionError,
        match="ValueError: row 1 of the batch: 'advantages' has 2 values for a response of 1 token",
    ):
        made(rank_pool, rows=[0, 1], packing=True, batch=batch)
