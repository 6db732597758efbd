"""Test what a sample file says about each token of the loss, with numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
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
    PolicyLossKind,
    PPOConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    VESPOConfig,
)
from megarl.recipes.quickstart.prepare import make_tokenizer
from megarl.roles.models import LOSS_MASK, POLICY_LOG_PROBS
from megarl.tracking.samples import LATE, OFF_POLICY, REJECTED
from megarl.trainers.samples import SampleRows

NAN = float("nan")  # values outside the mask must not count
MASK = torch.tensor([[True, True], [True, False]])
ENGINE = torch.log(torch.tensor([[0.25, 0.5], [0.5, NAN]]))
RATIOS = torch.tensor([[2.0, 1.0], [0.5, 1.0]])  # of trainer to engine


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    make_tokenizer().save_pretrained(tmp_path)
    return PPOConfig(
        model=ModelConfig(path=str(tmp_path)),
        algorithm=AlgorithmConfig(policy_loss=PolicyLossConfig(aggregation=Aggregation.token_mean)),
    )


def batch(**tensors: torch.Tensor) -> DataProto:
    """Return two samples, of two tokens and of one. Their ratios of trainer to engine are 2, 1 and 0.5."""
    columns = {
        "prompts": torch.tensor([[3], [3]]),
        "responses": torch.tensor([[4, 5], [6, 0]]),
        "response_mask": MASK,
        "advantages": torch.tensor([[1.0, -2.0], [3.0, NAN]]),
        "old_log_probs": ENGINE + RATIOS.log(),
        "rollout_log_probs": ENGINE,
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


def with_loss(config: PPOConfig, *, bypass: bool = False, **loss: Any) -> PPOConfig:
    section = PolicyLossConfig(aggregation=Aggregation.token_mean, **loss)
    correction = RolloutCorrectionConfig(bypass=bypass)
    algorithm = AlgorithmConfig(policy_loss=section, rollout_correction=correction)
    return dataclasses.replace(config, algorithm=algorithm)


@pytest.mark.parametrize(
    ("limit", "advantages", "expected"),
    [
        # Means of log mu - log pi: -log(2) / 2 of the first response, log(2) = 0.693 of the second.
        (0.6, [[1.0, -2.0], [-3.0, NAN]], [[0, 0], [OFF_POLICY]]),
        (0.7, [[1.0, -2.0], [-3.0, NAN]], [[0, 0], [0]]),
        (0.6, [[1.0, -2.0], [3.0, NAN]], [[0, 0], [0]]),  # good responses stay
    ],
)
def test_an_unlikely_bad_response_is_left_out(
    config: PPOConfig, limit: float, advantages: list[list[float]], expected: list[list[int]]
) -> None:
    found = columns(with_loss(config, off_policy_limit=limit), batch(advantages=torch.tensor(advantages)))
    assert found["excluded"] == expected
    total = 3.0 if expected[1] == [OFF_POLICY] else 6.0
    assert found["loss_share"] == [
        pytest.approx([1 / total, 2 / total]),
        pytest.approx([0.0 if total == 3.0 else 0.5]),
    ]


def test_a_rejected_token_of_an_unlikely_response_is_rejected(config: PPOConfig) -> None:
    rows = batch(
        advantages=torch.tensor([[1.0, -2.0], [-3.0, NAN]]),
        **{LOSS_MASK: torch.tensor([[True, True], [False, False]])},
    )
    assert columns(with_loss(config, off_policy_limit=0.1), rows)["excluded"] == [[0, 0], [REJECTED]]


@pytest.mark.parametrize(
    ("loss", "advantages", "sizes"),
    [
        # Ratios of the responses: 2 x 1 = 2 and 0.5. Good ones have the weight 1, bad ones min(W, 1).
        ({"kind": PolicyLossKind.topr}, [[1.0, 1.0], [-4.0, NAN]], [[1.0, 1.0], [2.0]]),
        ({"kind": PolicyLossKind.topr}, [[-1.0, -1.0], [4.0, NAN]], [[1.0, 1.0], [4.0]]),
        # W^k exp(rate (1 - W)) with k = 1 and rate = 1: 2 / e, and 0.5 sqrt(e).
        (
            {"kind": PolicyLossKind.vespo, "vespo": VESPOConfig(power_positive=1, rate_positive=1)},
            [[1.0, 1.0], [1.0, NAN]],
            [[2 / math.e, 2 / math.e], [0.5 * math.sqrt(math.e)]],
        ),
        # The ratio of each token: 2 is cut at 1.2, where it has no gradient.
        ({"kind": PolicyLossKind.ppo_clip}, [[1.0, 1.0], [1.0, NAN]], [[0.0, 1.0], [0.5]]),
    ],
)
def test_with_bypass_a_share_has_the_weight_of_the_loss(
    config: PPOConfig, loss: dict[str, Any], advantages: list[list[float]], sizes: list[list[float]]
) -> None:
    policy = {POLICY_LOG_PROBS: ENGINE + RATIOS.log()}
    rows = batch(advantages=torch.tensor(advantages), old_log_probs=ENGINE, **policy)
    found = columns(with_loss(config, bypass=True, **loss), rows)["loss_share"]
    total = sum(map(sum, sizes))
    assert found == [pytest.approx([size / total for size in row]) for row in sizes]


def test_a_batch_without_the_policy_counts_every_ratio_as_1(config: PPOConfig) -> None:
    loss = with_loss(config, bypass=True, kind=PolicyLossKind.topr)
    found = columns(loss, batch(old_log_probs=ENGINE))["loss_share"]
    assert found == [pytest.approx([1 / 6, 2 / 6]), pytest.approx([3 / 6])]
