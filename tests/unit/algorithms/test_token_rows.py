"""Ragged rows and padded tensors give the same results, with NaN wherever values must not be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from megarl.algorithms.advantages.token_level import rewards_to_go
from megarl.algorithms.groups import penalise_overlong
from megarl.algorithms.kl import apply_kl_penalty, sequence_mean_kl
from megarl.algorithms.losses import MiniBatchCounts
from megarl.algorithms.masked import map_tokens, masked_mean
from megarl.algorithms.metrics import age_metrics, data_metrics
from megarl.algorithms.rollout_correction import correct
from megarl.algorithms.user_functions import estimator_of
from megarl.batch import ragged
from megarl.batch.ragged import Column, RaggedTensor, padded
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    CorrectionKind,
    CorrectionLevel,
    KLEstimator,
    OverlongConfig,
    RejectionConfig,
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrectionConfig,
)

TOKEN_KEYS = (
    "token_level_scores",
    "values",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_prob",
    "teacher_log_prob",
    "sum_pi_squared",
)
WIDTH = 7


class Case:
    """A batch of responses with `lengths`.

    `written` marks the tokens that the model generated, at least one per response. Rows are in arbitrary
    order in the values, as after scoring a batch.
    """

    def __init__(self, lengths: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.tensor(lengths)
        shape = (len(lengths), WIDTH)
        exists = torch.arange(WIDTH) < self.lengths[:, None]
        written = (torch.rand(shape, generator=generator) < 0.7) & exists
        written[:, 0] = True
        noise = {
            key: torch.where(exists, -2 * torch.rand(shape, generator=generator), torch.nan)
            for key in TOKEN_KEYS
        }
        versions = torch.where(exists, torch.randint(1, 4, shape, generator=generator, dtype=torch.int32), -1)
        self.dense: dict[str, Tensor] = {**noise, "token_versions": versions, "response_mask": written}
        self.rows: dict[str, RaggedTensor] = {}

        for key, x in self.dense.items():
            order = torch.randperm(len(lengths), generator=generator)
            self.rows[key] = RaggedTensor.from_padded(x[order], self.lengths[order]).select(order.argsort())

        self.uid = np.array([f"prompt {row // 2}" for row in range(len(lengths))], dtype=object)
        self.parts = torch.rand(len(lengths), 2, generator=generator)

    def inputs(
        self, columns: dict[str, Tensor] | dict[str, RaggedTensor], kind: AdvantageEstimator
    ) -> AdvantageInputs:
        scores: Column = columns["token_level_scores"]
        if kind.needs.outcomes:
            scores = map_tokens(torch.abs, columns["response_mask"], scores)
        return AdvantageInputs(
            token_level_rewards=scores,
            response_mask=columns["response_mask"],
            uid=self.uid,
            baseline_scores=self.parts[:, 0],
            score_parts=self.parts,
            **{
                key: columns[key] for key in ("values", "old_log_probs", "teacher_log_prob", "sum_pi_squared")
            },
        )


CASES = st.builds(Case, st.lists(st.integers(1, WIDTH), min_size=1, max_size=9), st.integers(0, 99))


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> None:
    """Reduce the block size, so that several blocks exist."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_CACHED_ELEMENTS", 12)
        yield


def same_tokens(found: Column, expected: Column, mask: Tensor) -> None:
    assert isinstance(found, RaggedTensor)
    torch.testing.assert_close(found.padded(WIDTH)[mask], padded(expected)[mask], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", AdvantageEstimator)
@settings(max_examples=15, deadline=None)
@given(case=CASES)
def test_estimators(kind: AdvantageEstimator, case: Case) -> None:
    config = AdvantageConfig(estimator=kind, gamma=0.9, lam=0.8)
    mask = case.dense["response_mask"]
    expected, found = (
        ADVANTAGE_ESTIMATORS[kind](case.inputs(columns, kind), config) for columns in (case.dense, case.rows)
    )

    for name in ("advantages", "returns"):
        same_tokens(getattr(found, name), getattr(expected, name), mask)
        assert not getattr(found, name).padded(WIDTH)[~mask].any()


@settings(max_examples=20, deadline=None)
@given(case=CASES)
def test_penalties_metrics_and_corrections(case: Case) -> None:
    mask = case.dense["response_mask"]
    rejection = RejectionConfig(estimator=RejectionEstimator.k2, level=RejectionLevel.geometric, high=0.3)
    config = RolloutCorrectionConfig(
        level=CorrectionLevel.sequence, kind=CorrectionKind.mask, low=0.5, high=2.0, rejection=rejection
    )
    results = []

    for columns in (case.dense, case.rows):
        scores, old, reference = (
            columns[key] for key in ("token_level_scores", "old_log_probs", "ref_log_prob")
        )
        correction = correct(old, columns["rollout_log_probs"], columns["response_mask"], config)
        penalized, penalty_metrics = penalise_overlong(
            scores, columns["response_mask"], WIDTH, OverlongConfig(buffer_share=0.5, penalty=1.0)
        )
        assert correction.weights is not None
        with_kl, mean_kl = apply_kl_penalty(
            scores, old, reference, columns["response_mask"], 0.1, KLEstimator.k3
        )
        tokens = [
            with_kl,
            correction.weights,
            penalized,
        ]
        metrics = {
            **correction.metrics,
            **penalty_metrics,
            **data_metrics({**columns, "advantages": columns["values"], "returns": scores}, WIDTH),
            **age_metrics(columns, 3),
            "kl": sequence_mean_kl(old, reference, columns["response_mask"], KLEstimator.k3),
            "kl of the penalty": mean_kl,
            "mean": masked_mean(columns["values"], columns["response_mask"]),
        }
        results.append(
            (tokens, padded(correction.mask), metrics, MiniBatchCounts.of(columns["response_mask"]))
        )

    (expected, kept, of_dense, counts), (found, kept_rows, of_rows, counts_of_rows) = results
    for left, right in zip(found, expected, strict=True):
        same_tokens(left, right, mask)
    assert torch.equal(kept_rows, kept[:, : kept_rows.shape[1]])
    assert of_rows == pytest.approx(of_dense, abs=1e-6, rel=1e-5)
    assert counts_of_rows == counts


def test_columns_of_other_tokens_are_refused() -> None:
    """A padded tensor together with ragged rows, and rows of other lengths, would assign values to the wrong
    tokens."""
    mask = RaggedTensor.constant(True, torch.tensor([2, 3]), torch.bool)
    padded_column = torch.zeros(2, 3)
    other = RaggedTensor.constant(1.0, torch.tensor([3, 2]), torch.float32)

    for column in (padded_column, other):
        with pytest.raises(ValueError, match="columns of a batch must cover the same tokens"):
            masked_mean(column, mask)
        with pytest.raises(ValueError, match="columns of a batch must cover the same tokens"):
            rewards_to_go(column, mask, gamma=1.0)


def test_a_function_of_the_user_gets_tensors(tmp_path: Path) -> None:
    """The tensors are as wide as the longest response, with a False mask beyond a row's tokens; values
    returned there are dropped."""
    (tmp_path / "own.py").write_text(
        "from megarl.algorithms.advantages import Advantages\n"
        "def own(inputs, config):\n"
        "    rewards = inputs.token_level_rewards\n"
        "    assert rewards.shape == inputs.response_mask.shape == inputs.values.shape == (3, 4)\n"
        "    return Advantages(rewards + 1, rewards + 2)\n"
    )
    case = Case([2, 4, 1], seed=0)
    config = AdvantageConfig(function=f"{tmp_path / 'own.py'}:own")
    made = estimator_of(config)(case.inputs(case.rows, AdvantageEstimator.grpo), config)
    mask = case.rows["response_mask"].padded()
    rewards = case.dense["token_level_scores"][:, :4]
    assert isinstance(made.advantages, RaggedTensor)
    assert made.advantages.lengths.tolist() == [2, 4, 1]
    assert torch.equal(made.advantages.padded(), torch.where(mask, rewards + 1, 0.0))
