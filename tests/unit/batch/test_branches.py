"""Test episodes of several rows: merged and split columns, and advantages that count episodes, by hand."""

from __future__ import annotations

import pytest
import torch

from megarl.batch.branches import BRANCH, FAILURE, ends_episode, last_rows, merge_branches, split_branches
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, AlgorithmConfig, KLConfig, KLWhere
from megarl.trainers.advantages import AdvantageStep

# Three episodes of one prompt: two rows with 2 and 1 tokens of the model, one row with 1, and a failed one.
MASKS = [[True, False, True], [True], [True, True], [False]]
SCORES = [[0.0, 0.0, 0.0], [4.0], [0.0, 1.0], [0.0]]


def batch() -> DataProto:
    masks = RaggedTensor.of_rows(MASKS, torch.bool)
    return DataProto.from_dict(
        {
            "prompts": RaggedTensor.of_rows([[1], [1, 2], [1], [1]], torch.int32, on_left=True),
            "responses": RaggedTensor.of_rows([[5, 6, 7], [8], [9, 10], [0]], torch.int32),
            "response_mask": masks,
            "token_level_scores": RaggedTensor.of_rows(SCORES, torch.float32),
            "is_scored": torch.tensor([True, True, True, False]),
        },
        {
            "uid": ["a"] * 4,
            BRANCH: [0, 1, 0, 0],
            FAILURE: [None, None, None, "raised"],
        },
    )


def test_rows_of_an_episode_are_merged_and_split() -> None:
    rows = batch()
    assert ends_episode(rows).tolist() == [False, True, True, True]
    assert last_rows(rows).non_tensor_batch[BRANCH].tolist() == [1, 0, 0]
    merged = merge_branches(rows)
    assert [row.tolist() for row in merged.ragged["responses"].each()] == [[5, 6, 7, 8], [9, 10], [0]]
    assert merged.ragged["response_mask"].lengths.tolist() == [4, 2, 1]
    assert merged.ragged["prompts"].lengths.tolist() == [2, 1, 1]
    again = split_branches({"responses": merged.ragged["responses"]}, rows)
    assert again["responses"] == rows.ragged["responses"]


def test_a_batch_of_single_rows_is_not_copied() -> None:
    rows = batch().select_idxs([1, 2, 3])
    rows.non_tensor_batch[BRANCH][0] = 0
    assert merge_branches(rows) is rows
    del rows.non_tensor_batch[BRANCH]
    assert merge_branches(rows) is rows


def test_advantages_compare_episodes_and_are_shared_by_their_rows() -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.rloo), kl=KLConfig(where=KLWhere.none)
    )
    rows, _ = AdvantageStep(algorithm, max_response_length=9)(batch())
    # Leave-one-out of the scores 4 and 1; the failed episode is compared with no other.
    found = [row.tolist() for row in rows.ragged["advantages"].each()]
    assert found == [
        [pytest.approx(3.0), 0.0, pytest.approx(3.0)],
        [pytest.approx(3.0)],
        [pytest.approx(-3.0)] * 2,
        [0.0],
    ]
