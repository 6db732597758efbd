"""Weights, rejections and diagnostics of rollout log-probs: worked examples, comparison with loops, and exact
expectations."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.rollout_correction import correct, diagnostics
from megarl.config.schema import (
    CorrectionKind,
    CorrectionLevel,
    RejectionConfig,
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrectionConfig,
)
from tests.unit.algorithms.strategies import masks, normal, poison

NAN = float("nan")
INF = float("inf")
LEVELS = [level for level in CorrectionLevel if level is not CorrectionLevel.none]
# Ratios of the trainer's to the rollout's probabilities: 2 and 0.25, then 4 on the only token of the second
# row; the third is empty.
MASK = torch.tensor([[True, True], [True, False], [False, False]])
RATIOS = torch.tensor([[2.0, 0.25], [4.0, NAN], [NAN, NAN]])
ROLLOUT = torch.full((3, 2), math.log(0.1))


def correction(**config):
    return correct(RATIOS.log() + ROLLOUT, ROLLOUT, MASK, RolloutCorrectionConfig(**config))


@pytest.mark.parametrize(
    ("level", "kind", "expected", "fraction"),
    [
        (CorrectionLevel.token, CorrectionKind.truncate, [[2.0, 0.25], [3.0, 0.0], [0.0, 0.0]], 1 / 3),
        (CorrectionLevel.token, CorrectionKind.mask, [[2.0, 0.0], [0.0, 0.0], [0.0, 0.0]], 2 / 3),
        (CorrectionLevel.sequence, CorrectionKind.truncate, [[0.5, 0.5], [3.0, 0.0], [0.0, 0.0]], 1 / 2),
        (CorrectionLevel.sequence, CorrectionKind.mask, [[0.5, 0.5], [0.0, 0.0], [0.0, 0.0]], 1 / 2),
        (CorrectionLevel.geometric, CorrectionKind.truncate, [[0.5**0.5] * 2, [3.0, 0.0], [0.0, 0.0]], 1 / 2),
        (CorrectionLevel.geometric, CorrectionKind.mask, [[0.5**0.5] * 2, [0.0, 0.0], [0.0, 0.0]], 1 / 2),
    ],
)
def test_weights_by_hand(level, kind, expected, fraction):
    result = correction(level=level, kind=kind, low=0.3, high=3.0)
    torch.testing.assert_close(result.weights, torch.tensor(expected))
    assert torch.equal(result.mask, MASK)
    name = "truncated" if kind is CorrectionKind.truncate else "masked"
    assert result.metrics[f"rollout_correction/fraction_{name}"] == pytest.approx(fraction)


def test_weight_metrics_by_hand():
    # weights 2, 0.25, 3: sum 5.25, squares 13.0625, over 3 tokens
    metrics = correction(level=CorrectionLevel.token, high=3.0).metrics
    assert metrics["rollout_correction/weight_mean"] == pytest.approx(5.25 / 3)
    assert metrics["rollout_correction/effective_sample_size"] == pytest.approx(5.25**2 / (3 * 13.0625))

    # responses: 0.5 and 3
    metrics = correction(level=CorrectionLevel.sequence, high=3.0).metrics
    assert metrics["rollout_correction/weight_mean"] == pytest.approx(1.75)
    assert metrics["rollout_correction/effective_sample_size"] == pytest.approx(3.5**2 / (2 * 9.25))


def test_nothing_is_done_by_default():
    result = correction()
    assert result.weights is None
    assert torch.equal(result.mask, MASK)
    assert set(result.metrics) == set(diagnostics(RATIOS.log() + ROLLOUT, ROLLOUT, MASK))


LN2 = math.log(2)
# Sums over the rows of -x, x^2 / 2, e^x - 1 - x; x = ln 2, -2 ln 2 and 2 ln 2
ESTIMATES = {
    RejectionEstimator.k1: (LN2, -2 * LN2),
    RejectionEstimator.k2: (2.5 * LN2**2, 2 * LN2**2),
    RejectionEstimator.k3: ((1 - LN2) + (-0.75 + 2 * LN2), 3 - 2 * LN2),
}


@pytest.mark.parametrize("estimator", list(ESTIMATES))
@pytest.mark.parametrize("level", [RejectionLevel.sequence, RejectionLevel.geometric])
def test_rejection_by_hand(estimator, level):
    first, second = ESTIMATES[estimator]
    first /= 2 if level is RejectionLevel.geometric else 1

    for high in (first - 1e-4, first + 1e-4, second - 1e-4, second + 1e-4):
        result = correction(rejection=RejectionConfig(estimator=estimator, level=level, high=high))
        kept = [first <= high, second <= high]
        assert result.mask.tolist() == [[kept[0], kept[0]], [kept[1], False], [False, False]]
        assert result.metrics["rollout_correction/fraction_rejected"] == (2 - sum(kept)) / 2


@pytest.mark.parametrize(
    ("estimator", "low", "high", "expected"),
    [
        # -x: -ln 2, 2 ln 2 and -2 ln 2
        (RejectionEstimator.k1, None, 1.0, [[True, False], [True, False], [False, False]]),
        (RejectionEstimator.k1, -1.0, 1.0, [[True, False], [False, False], [False, False]]),
        # x^2 / 2: 0.24, 0.96 and 0.96
        (RejectionEstimator.k2, None, 0.5, [[True, False], [False, False], [False, False]]),
        # e^x - 1 - x: 0.31, 0.64 and 1.61
        (RejectionEstimator.k3, None, 1.0, [[True, True], [False, False], [False, False]]),
    ],
)
def test_tokens_are_rejected_by_themselves(estimator, low, high, expected):
    rejection = RejectionConfig(estimator=estimator, level=RejectionLevel.token, low=low, high=high)
    result = correction(rejection=rejection)
    assert result.mask.tolist() == expected
    kept = sum(map(sum, expected))
    assert result.metrics["rollout_correction/fraction_rejected"] == pytest.approx((3 - kept) / 3)


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        # x^2 / 2: 0.24, 0.96 and 0.96, with a mean of 0.72
        (0.73, [[True, True], [True, False], [False, False]]),
        # Without one of the larger two the mean would be 0.6, but equal tokens share their fate.
        (0.70, [[True, False], [False, False], [False, False]]),
        (0.25, [[True, False], [False, False], [False, False]]),
        (0.20, [[False, False], [False, False], [False, False]]),
    ],
)
def test_the_largest_tokens_of_a_batch_are_rejected_until_its_mean_is_in_bounds(high, expected):
    rejection = RejectionConfig(estimator=RejectionEstimator.k2, level=RejectionLevel.batch, high=high)
    result = correction(rejection=rejection)
    assert result.mask.tolist() == expected
    kept = sum(map(sum, expected))
    assert result.metrics["rollout_correction/fraction_rejected"] == pytest.approx((3 - kept) / 3)


@pytest.mark.parametrize("estimator", [RejectionEstimator.k2, RejectionEstimator.k3])
@pytest.mark.parametrize("high", [1e-3, 0.05, 0.3, 10.0])
def test_rejection_in_a_batch_matches_a_loop_over_its_tokens(estimator, high):
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(40, 30, generator=generator) < 0.7
    x = 0.6 * torch.randn(40, 30, generator=generator, dtype=torch.float64)
    rollout = -torch.rand(40, 30, generator=generator, dtype=torch.float64)
    x[~mask] = math.nan  # what stands in masked slots must not count

    tokens = sorted(
        (0.5 * value**2 if estimator is RejectionEstimator.k2 else math.expm1(value) - value, index)
        for index, value in enumerate(x.flatten().tolist())
        if not math.isnan(value)
    )
    while tokens and math.fsum(value for value, _ in tokens) / len(tokens) > high:
        tokens.pop()
    expected = torch.zeros(40 * 30, dtype=torch.bool)
    expected[[index for _, index in tokens]] = True

    rejection = RejectionConfig(estimator=estimator, level=RejectionLevel.batch, high=high)
    kept = correct(x + rollout, rollout, mask, RolloutCorrectionConfig(rejection=rejection)).mask
    assert torch.equal(kept, expected.view(40, 30))
    assert 0 < int(kept.sum()) <= int(mask.sum())


def test_rejection_has_two_sides():
    result = correction(
        rejection=RejectionConfig(
            estimator=RejectionEstimator.k1, level=RejectionLevel.sequence, low=-1.0, high=1.0
        )
    )
    assert result.mask.tolist() == [[True, True], [False, False], [False, False]]


def test_weights_and_rejection_go_together():
    rejection = RejectionConfig(estimator=RejectionEstimator.k1, level=RejectionLevel.sequence, high=0.0)
    result = correction(level=CorrectionLevel.token, high=8.0, rejection=rejection)
    torch.testing.assert_close(result.weights, RATIOS.nan_to_num(0.0))
    assert result.mask.tolist() == [[False, False], [True, False], [False, False]]


def test_diagnostics_by_hand():
    x = [LN2, -2 * LN2, 2 * LN2]
    expected = {
        "kl_k1": -sum(x) / 3,
        "kl": sum(math.exp(v) - 1 - v for v in x) / 3,
        "kl_reverse": sum(v * math.exp(v) - math.exp(v) + 1 for v in x) / 3,
        "chi_square_token": (4 + 1 / 16 + 16) / 3 - 1,
        "chi_square_sequence": (0.25 + 16) / 2 - 1,
        "ratio_max": 4.0,
        "ratio_min": 0.25,
    }
    got = diagnostics(RATIOS.log() + ROLLOUT, ROLLOUT, MASK)
    assert got == pytest.approx(
        {f"rollout_correction/{name}": value for name, value in expected.items()}, rel=1e-5
    )


def test_estimates_have_the_expectations_that_they_claim():
    """The expectation is over all tokens of a distribution, each as often as the rollout samples it (10 rows
    represent 10 draws)."""
    rollout = torch.tensor([0.5, 0.3, 0.2])
    trainer = torch.tensor([0.2, 0.5, 0.3])
    token = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)[:, None]
    got = diagnostics(trainer.log()[token], rollout.log()[token], torch.ones(10, 1, dtype=torch.bool))
    kl, reverse = (float((p * (p / q).log()).sum()) for p, q in ((rollout, trainer), (trainer, rollout)))
    chi_square = float(((trainer - rollout) ** 2 / rollout).sum())
    expected = {
        "kl_k1": kl,
        "kl": kl,
        "kl_reverse": reverse,
        "chi_square_token": chi_square,
        "chi_square_sequence": chi_square,
    }
    assert {name: got[f"rollout_correction/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("level", "kind"), list(itertools.product(LEVELS, CorrectionKind)))
@settings(max_examples=20, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000))
def test_weights_match_a_loop_whatever_stands_in_masked_slots_and_in_any_order(level, kind, mask, seed):
    old = normal(mask, seed)
    rollout = normal(mask, seed + 1)
    config = RolloutCorrectionConfig(level=level, kind=kind, low=0.5, high=1.5)
    weights = correct(poison(old, mask), poison(rollout, mask, -INF), mask, config).weights

    for row in range(len(mask)):
        valid = [t for t in range(mask.shape[1]) if mask[row, t]]
        logs = [float(old[row, t] - rollout[row, t]) for t in valid]
        expected = [0.0] * mask.shape[1]
        for t, log in zip(valid, logs, strict=True):
            total = {"token": log, "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[level.value]
            weight = math.exp(total)
            expected[t] = (
                min(weight, 1.5)
                if kind is CorrectionKind.truncate
                else weight
                if 0.5 <= weight <= 1.5
                else 0.0
            )
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-9)

    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(
        correct(old[order], rollout[order], mask[order], config).weights, weights[order]
    )


@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_have_weights_of_one_and_no_distance(level):
    log_probs = torch.where(MASK, -1.5, NAN)
    result = correct(log_probs, log_probs, MASK, RolloutCorrectionConfig(level=level))
    assert torch.equal(result.weights, MASK.float())
    zero = {
        name: value
        for name, value in result.metrics.items()
        if not name.endswith(("_max", "_min", "mean", "size"))
    }
    assert set(zero.values()) == {0.0}
    assert result.metrics["rollout_correction/effective_sample_size"] == 1.0


def test_a_collapsed_token_stays_finite():
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = torch.tensor([[0.0, 0.0, -500.0]])
    rollout = torch.tensor([[-500.0, -500.0, 0.0]])
    result = correct(old, rollout, mask, RolloutCorrectionConfig(level=CorrectionLevel.sequence, high=5.0))
    assert result.weights.tolist() == [[5.0] * 3]
    assert all(math.isfinite(value) for value in result.metrics.values())


def test_a_batch_without_a_token_has_no_distance():
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    result = correct(
        torch.full((2, 2), NAN),
        torch.full((2, 2), NAN),
        nothing,
        RolloutCorrectionConfig(level=CorrectionLevel.token),
    )
    assert diagnostics(ROLLOUT[:2], ROLLOUT[:2], nothing) == {}
    assert torch.equal(result.weights, torch.zeros(2, 2))
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("value", [NAN, -INF])
def test_log_probs_that_are_no_numbers_are_refused(value):
    log_probs = torch.tensor([[0.0, 0.0], [value, 0.0]])
    with pytest.raises(ValueError, match=r"rows \[1\] \(of 2\) are not finite.*top_p=1"):
        correct(torch.zeros(2, 2), log_probs, torch.ones(2, 2, dtype=torch.bool), RolloutCorrectionConfig())
