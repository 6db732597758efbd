"""Test what the other algorithms add to the loop, end to end on real Ray: greedy baselines, dynamic sampling,
corrections, bypass."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    Aggregation,
    AlgorithmConfig,
    CorrectionLevel,
    DynamicSamplingConfig,
    KLConfig,
    KLWhere,
    OverlongConfig,
    PolicyLossConfig,
    RejectionConfig,
    RejectionEstimator,
    RolloutCorrectionConfig,
    SamplingConfig,
)
from tests.integration.test_ppo import config
from tests.integration.tiny_run import Finished, run_ppo, save_inputs

pytestmark = pytest.mark.usefixtures("ray_cluster")

NO_KL = KLConfig(where=KLWhere.none)
NUM_PROMPTS = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    return folder


def algorithm(estimator: AdvantageEstimator, **parts: object) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=AdvantageConfig(estimator=estimator), kl=NO_KL, **parts)  # type: ignore[arg-type]


def assert_healthy(finished: Finished, num_steps: int) -> None:
    assert [line["step"] for line in finished.metrics if line["step"] > 0] == list(range(1, num_steps + 1))
    assert all(math.isfinite(value) for line in finished.metrics for value in line.values())
    assert all(line["actor/grad_norm"] > 0 for line in finished.metrics if line["step"] > 0)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_remax_generates_a_greedy_response_to_each_prompt(
    inputs: Path, tmp_path: Path, max_staleness: int
) -> None:
    """The greedy scores are those that a validation of the same weights and prompts would give, so the mean
    is on a grid of quarters over four prompts; they differ from the samples' scores."""
    correction = RolloutCorrectionConfig(
        level=CorrectionLevel.token if max_staleness else CorrectionLevel.none
    )
    with_baseline = algorithm(AdvantageEstimator.remax, rollout_correction=correction)
    remax = config(inputs, tmp_path, with_baseline, updates_per_step=1, total_steps=2, validate_before=False)
    validation = SamplingConfig(n=4, temperature=1.0)
    finished = run_ppo(
        replace(remax, rollout=replace(remax.rollout, validation=validation, max_staleness=max_staleness))
    )
    assert_healthy(finished, 2)
    assert [line["rollout/age/max"] for line in finished.metrics] == [0, max_staleness]

    for line in finished.metrics:
        baseline = line["critic/baseline/mean"]
        assert baseline * 4 * NUM_PROMPTS == pytest.approx(round(baseline * 4 * NUM_PROMPTS))
        # The advantage is the sample's score minus its prompt's greedy score, on each token.
        assert line["critic/advantages/max"] <= line["critic/score/max"] + 1e-6

    assert {"val/count/best@2", "val/count/best@4", "val/count/pass@4"} <= finished.metrics[-1].keys()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_dapo_with_a_correction(inputs: Path, tmp_path: Path, max_staleness: int) -> None:
    """Every ratio of a single update is exactly 1, whatever the engine's log-probs are. Each step contains
    only groups with a signal."""
    dapo = algorithm(
        AdvantageEstimator.grpo,
        dynamic_sampling=DynamicSamplingConfig(enabled=True, max_generations=20),
        overlong=OverlongConfig(buffer_share=0.5, penalty=0.5),
        rollout_correction=RolloutCorrectionConfig(
            level=CorrectionLevel.token, rejection=RejectionConfig(estimator=RejectionEstimator.k3, high=0.1)
        ),
    )
    run = config(inputs, tmp_path, dapo, updates_per_step=1, total_steps=2, validate_before=False)
    finished = run_ppo(replace(run, rollout=replace(run.rollout, max_staleness=max_staleness)))
    assert_healthy(finished, 2)
    assert sum(line["dynamic_sampling/num_without_signal"] for line in finished.metrics) > 0
    assert finished.metrics[0]["rollout/age/max"] == 0
    assert finished.metrics[1]["rollout/age/max"] <= max_staleness

    for line in finished.metrics:
        assert line["groups/without_signal"] == 0
        drawn = [
            line[f"dynamic_sampling/{name}"] for name in ("num_prompts", "num_without_signal", "num_surplus")
        ]
        assert drawn[0] - drawn[1] - drawn[2] == NUM_PROMPTS
        assert (line["actor/ratio_min"], line["actor/ratio_max"]) == (1.0, 1.0)
        if line["rollout/age/max"] == 0:
            assert line["rollout_correction/weight_mean"] == pytest.approx(1, abs=1e-4)
            assert line["rollout_correction/fraction_rejected"] == 0
        assert line["reward/overlong_penalty"] < 0
        assert line["critic/rewards/mean"] == pytest.approx(
            line["critic/score/mean"] + line["reward/overlong_penalty"]
        )


def test_bypass_scores_the_first_batch_alone(inputs: Path, tmp_path: Path) -> None:
    """The ratio is then between the trainer's and the engine's log-probs, which differ by rounding."""
    bypass = algorithm(AdvantageEstimator.grpo, rollout_correction=RolloutCorrectionConfig(bypass=True))
    finished = run_ppo(
        config(inputs, tmp_path, bypass, updates_per_step=1, total_steps=2, validate_before=False)
    )
    assert_healthy(finished, 2)
    first, second = finished.metrics
    assert "timing_s/old_log_prob" in first
    assert not second.keys() & {"timing_s/old_log_prob", "actor/entropy", "training/rollout_probs_diff_max"}

    for line in finished.metrics:
        assert line["actor/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert (line["actor/ratio_min"], line["actor/ratio_max"]) != (1.0, 1.0)


def test_the_optimal_token_baseline_has_the_probabilities_that_it_needs(inputs: Path, tmp_path: Path) -> None:
    loss = PolicyLossConfig(aggregation=Aggregation.sequence_mean_token_sum)
    baseline = algorithm(AdvantageEstimator.optimal_token_baseline, policy_loss=loss)
    finished = run_ppo(config(inputs, tmp_path, baseline, total_steps=1, validate_before=False))
    assert_healthy(finished, 1)
    (line,) = finished.metrics
    assert line["critic/advantages/std"] > 0
    assert line["actor/ratio_max"] != 1.0  # two updates: the second is of a policy that has changed
