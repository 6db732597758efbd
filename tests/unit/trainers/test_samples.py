"""Test what a sample file says about each token of the loss, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    CorrectionLevel,
    Late,
    ModelConfig,
    PolicyLossConfig,
    PPOConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
)
from megarl.recipes.quickstart.prepare import make_tokenizer
from megarl.roles.models import LOSS_MASK
from megarl.tracking.samples import LATE, REJECTED
from megarl.trainers.samples import SampleRows

NAN = float("nan")  # values outside the mask must not count
MASK = torch.tensor([[True, True], [True, False]])


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    make_tokenizer().save_pretrained(tmp_path)
    return PPOConfig(
        model=ModelConfig(path=str(tmp_path)),
        algorithm=AlgorithmConfig(policy_loss=PolicyLossConfig(aggregation=Aggregation.token_mean)),
    )


def batch(**tensors: torch.Tensor) -> DataProto:
    """Return two samples, of two tokens and of one. Their ratios of trainer to engine are 2, 1 and 0.5."""
    engine = torch.log(torch.tensor([[0.25, 0.5], [0.5, NAN]]))
    columns = {
        "prompts": torch.tensor([[3], [3]]),
        "responses": torch.tensor([[4, 5], [6, 0]]),
        "response_mask": MASK,
        "advantages": torch.tensor([[1.0, -2.0], [3.0, NAN]]),
        "old_log_probs": engine + torch.log(torch.tensor([[2.0, 1.0], [0.5, 1.0]])),
        "rollout_log_probs": engine,
        "token_versions": torch.tensor([[7, 7], [5, 0]]),
        "score_parts": torch.tensor([[1.0], [0.0]]),
        **tensors,
    }
    # Samples have as many values as tokens; scores have one row each.
    rows = {
        name: column
        if name == "score_parts"
        else RaggedTensor.from_padded(column, torch.tensor([1, 1] if name == "prompts" else [2, 1]))
        for name, column in columns.items()
    }
    ground_truth = np.empty(2, dtype=object)
    ground_truth[:] = [{"ground_truth": "1"}] * 2
    arrays: dict[str, Any] = {
        "uid": ["a", "b"],
        "data_source": np.array(["sums", "sums"]),
        "reward_model": ground_truth,
        "score": [1.0, 0.0],
        "weight_version": np.array([7, 5]),
        "finish_reason": np.array(["stop", "stop"]),
    }
    return DataProto.from_dict(rows, arrays, {"weight_version": 7})


def columns(config: PPOConfig, rows: DataProto) -> dict[str, list[Any]]:
    table = SampleRows(config).table(rows, 1).rows
    return {name: table[name].to_pylist() for name in ("rollout_weights", "excluded", "loss_share")}


def corrected(config: PPOConfig, high: float) -> PPOConfig:
    section = RolloutCorrectionConfig(level=CorrectionLevel.token, high=high)
    return dataclasses.replace(
        config, algorithm=dataclasses.replace(config.algorithm, rollout_correction=section)
    )


def test_without_a_correction_a_share_is_that_of_the_advantage(config: PPOConfig) -> None:
    """|1| + |-2| + |3| = 6."""
    found = columns(config, batch())
    assert found["rollout_weights"] == found["excluded"] == [None, None]
    assert found["loss_share"] == [pytest.approx([1 / 6, 2 / 6]), pytest.approx([3 / 6])]


def test_weights_that_the_update_computed_are_those_of_the_batch(config: PPOConfig) -> None:
    """The ratios 2, 1 and 0.5 are limited to 1.5, so the sizes are 1.5, 2 and 1.5, in sum 5."""
    for rows in (batch(), batch(rollout_weights=torch.tensor([[1.5, 1.0], [0.5, NAN]]))):
        found = columns(corrected(config, 1.5), rows)
        assert found["rollout_weights"] == [pytest.approx([1.5, 1.0]), pytest.approx([0.5])]
        assert found["loss_share"] == [pytest.approx([0.3, 0.4]), pytest.approx([0.3])]


def test_the_mean_over_a_response_halves_the_share_of_two_tokens(config: PPOConfig) -> None:
    """1/2 + 2/2 + 3 = 4.5."""
    loss = PolicyLossConfig(aggregation=Aggregation.sequence_mean_token_mean)
    found = columns(dataclasses.replace(config, algorithm=AlgorithmConfig(policy_loss=loss)), batch())
    assert found["loss_share"] == [pytest.approx([0.5 / 4.5, 1 / 4.5]), pytest.approx([3 / 4.5])]


def test_a_token_that_is_left_out_names_the_rule(config: PPOConfig) -> None:
    """The second sample is two versions old, and the first one's last token was rejected."""
    rows = batch(**{LOSS_MASK: torch.tensor([[True, False], [False, False]])})
    rollout = RolloutConfig(late=Late.mask, max_staleness=1)
    found = columns(dataclasses.replace(config, rollout=rollout), rows)
    assert found["excluded"] == [[0, REJECTED], [LATE]]
    assert found["loss_share"] == [[1.0, 0.0], [0.0]]


def test_a_weight_that_the_loss_does_not_read_may_be_nan(config: PPOConfig) -> None:
    rows = batch(
        rollout_weights=torch.tensor([[1.5, NAN], [0.5, NAN]]),
        **{LOSS_MASK: torch.tensor([[True, False], [True, False]])},
    )
    assert columns(corrected(config, 1.5), rows)["loss_share"] == [pytest.approx([0.5, 0.0]), [0.5]]


def test_without_the_rule_of_age_only_a_rejection_leaves_out(config: PPOConfig) -> None:
    rows = batch(**{LOSS_MASK: torch.tensor([[True, True], [False, False]])})
    assert columns(config, rows)["excluded"] == [[0, 0], [REJECTED]]


def test_a_batch_without_advantages_has_no_shares(config: PPOConfig) -> None:
    found = columns(config, batch(advantages=torch.zeros(2, 2)))
    assert found["loss_share"] == [[0.0, 0.0], [0.0]]
