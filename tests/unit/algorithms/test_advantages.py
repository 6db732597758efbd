import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, gae, grpo
from megarl.config.schema import AdvantageConfig, AdvantageEstimator
from tests.unit.algorithms.reference import gae_row
from tests.unit.algorithms.strategies import masks, normal, poison

NAN, INF = float("nan"), float("inf")
FRACTIONS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def test_gae_by_hand():
    # gamma = 0.5, lam = 0.5. delta = [0 + .5*2 - 1, 0 + .5*4 - 2, 3 - 4] = [0, 0, -1]; A = [1/16 * -1, 1/4 * -1, -1]
    rewards, values = torch.tensor([[0.0, 0.0, 3.0]]), torch.tensor([[1.0, 2.0, 4.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.5, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-1 / 16, -1 / 4, -1.0]]))
    torch.testing.assert_close(returns, torch.tensor([[15 / 16, 7 / 4, 3.0]]))


def test_gae_skips_a_hole():
    """Tool output between two turns: the result is that of the row without the hole."""
    whole = gae(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.3, 0.2, 0.1]]), torch.ones(1, 3, dtype=torch.bool), 0.9, 0.8)
    mask = torch.tensor([[True, False, False, True, True, False]])
    rewards, values = torch.tensor([[0.0, NAN, 7.0, 1.0, 2.0, INF]]), torch.tensor([[0.3, 9.0, NAN, 0.2, 0.1, NAN]])
    holed = gae(rewards, values, mask, 0.9, 0.8)
    for a, b in zip(holed, whole, strict=True):
        torch.testing.assert_close(a[mask], b[0])
        assert torch.equal(a[~mask], torch.zeros(3))


@settings(max_examples=60, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000), gamma=FRACTIONS, lam=FRACTIONS)
def test_gae_is_the_backward_recursion(mask, seed, gamma, lam):
    rewards, values = normal(mask, seed), normal(mask, seed + 1)
    advantages, returns = gae(poison(rewards, mask), poison(values, mask, INF), mask, gamma, lam)
    for row in range(len(mask)):
        expected = gae_row(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam)
        np.testing.assert_allclose([advantages[row].tolist(), returns[row].tolist()], expected, rtol=1e-12, atol=1e-12)


def test_gae_stays_accurate_over_long_rows_in_float32():
    mask = torch.ones(2, 3000, dtype=torch.bool)
    rewards, values = normal(mask, 0), normal(mask, 1)
    exact, _ = gae_row(rewards[1].tolist(), values[1].tolist(), mask[1].tolist(), 1.0, 1.0)
    advantages, _ = gae(rewards.float(), values.float(), mask, 1.0, 1.0)
    assert advantages.dtype == torch.float32
    np.testing.assert_allclose(advantages[1].numpy(), exact, atol=1e-4)  # sums of 3000 numbers of size 1


def test_returns_without_discount_are_rewards_to_go():
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, returns = gae(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), normal(mask, 3, torch.float32), mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[10.0, 9.0, 7.0, 4.0]]))


def test_grpo_by_hand():
    # group a: outcomes 1, 3 -> mean 2, unbiased deviation sqrt(2); group b: one sample; group c: equal outcomes
    rewards = torch.tensor([[1.0, 0.0], [5.0, NAN], [1.0, 2.0], [4.0, 0.0], [2.0, 2.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]]).bool()
    advantages, returns = grpo(rewards, mask, np.array(["a", "b", "a", "c", "c"], dtype=object), epsilon=0.0 + 1e-12)
    half = 0.5**0.5
    torch.testing.assert_close(advantages, torch.tensor([[-half, -half], [0.0, 0.0], [half, half], [0.0, 0.0], [0.0, 0.0]]))
    assert torch.equal(advantages, returns)


@settings(max_examples=40, deadline=None)
@given(mask=masks(min_rows=2, max_rows=6), seed=st.integers(0, 1000))
def test_grpo_does_not_depend_on_the_order_of_rows(mask, seed):
    rewards, uid = normal(mask, seed), np.array([f"prompt-{row % 3}" for row in range(len(mask))], dtype=object)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    straight = grpo(rewards, mask, uid).advantages
    shuffled = grpo(rewards[order], mask[order], uid[order.numpy()]).advantages
    torch.testing.assert_close(shuffled, straight[order])


def test_registry_covers_every_estimator():
    assert set(ADVANTAGE_ESTIMATORS) == set(AdvantageEstimator)


def test_registered_gae_whitens_the_advantages_and_not_the_returns():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards, values = normal(mask, 0), normal(mask, 1)
    inputs = AdvantageInputs(token_level_rewards=rewards, response_mask=mask, values=values, uid=np.array(["a", "b"], dtype=object))
    advantages, returns = ADVANTAGE_ESTIMATORS[AdvantageEstimator.gae](inputs, AdvantageConfig(gamma=0.9, lam=0.8))
    assert abs(float(advantages[mask].mean())) < 1e-12
    assert float(advantages[mask].var()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(returns, gae(rewards, values, mask, 0.9, 0.8).returns)


def test_registered_gae_without_values_says_what_to_do():
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(1, 1), response_mask=torch.ones(1, 1).bool(), uid=np.array(["a"], dtype=object)
    )
    with pytest.raises(ValueError, match="needs the critic's `values`.*grpo"):
        ADVANTAGE_ESTIMATORS[AdvantageEstimator.gae](inputs, AdvantageConfig())
