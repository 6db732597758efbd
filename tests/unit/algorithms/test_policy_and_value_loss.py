import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.policy_loss import ppo_clip
from megarl.algorithms.value_loss import clipped_value_loss
from tests.unit.algorithms.reference import ppo_token, value_token
from tests.unit.algorithms.strategies import masks, normal, poison

NAN, INF = float("nan"), float("inf")


def test_ppo_clip_by_hand():
    ratios, advantages = [1.0, 1.5, 0.5, 1.5, 0.5, 10.0], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0]
    new, mask = torch.tensor([ratios]).log(), torch.ones(1, 6, dtype=torch.bool)
    result = ppo_clip(new, torch.zeros(1, 6), torch.tensor([advantages]), mask, 0.2, 0.3, None)
    torch.testing.assert_close(result.loss, torch.tensor([[-2.0, -2.6, -1.0, 3.0, 1.6, 20.0]]))
    assert result.clipped.tolist() == [[False, True, False, False, True, False]]
    dual = ppo_clip(new, torch.zeros(1, 6), torch.tensor([advantages]), mask, 0.2, 0.3, 3.0)
    torch.testing.assert_close(dual.loss, torch.tensor([[-2.0, -2.6, -1.0, 3.0, 1.6, 6.0]]))
    assert dual.dual_clipped.tolist() == [[False] * 5 + [True]]


def test_clipped_tokens_have_no_gradient_and_others_that_of_the_policy_gradient():
    new = torch.tensor([[0.0, math.log(1.5), math.log(10.0)]], requires_grad=True)
    mask, advantages = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[2.0, 2.0, -2.0]])
    ppo_clip(new, torch.zeros(1, 3), advantages, mask, 0.2, 0.2, 3.0).loss.sum().backward()
    assert new.grad.tolist() == [[-2.0, 0.0, 0.0]]


@settings(max_examples=60, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000), clip_dual=st.sampled_from([None, 1.5, 3.0]))
def test_ppo_clip_matches_the_reference_with_poisoned_masked_slots(mask, seed, clip_dual):
    new, old, advantages = (normal(mask, seed + k) for k in range(3))
    leaf = poison(new, mask).requires_grad_()
    result = ppo_clip(leaf, poison(old, mask, INF), poison(advantages, mask, -INF), mask, 0.2, 0.28, clip_dual)
    expected = torch.zeros_like(new)
    for row, t in mask.nonzero().tolist():
        expected[row, t] = ppo_token(float(new[row, t]), float(old[row, t]), float(advantages[row, t]), 0.2, 0.28, clip_dual)
    torch.testing.assert_close(result.loss.detach(), expected)
    result.loss.sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[~mask] == 0).all()


def test_ppo_clip_gradcheck():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    new, old, advantages = (normal(mask, k) for k in range(3))
    assert torch.autograd.gradcheck(lambda x: ppo_clip(x, old, advantages, mask, 0.2, 0.2, 3.0).loss, (new.requires_grad_(),))


def test_ratio_of_a_collapsed_token_is_finite():
    result = ppo_clip(torch.tensor([[0.0]]), torch.tensor([[-500.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1).bool(), 0.2, 0.2, None)
    assert torch.isfinite(result.loss).all()
    assert result.log_ratio.item() == 500.0


def test_value_loss_by_hand():
    # V = 2, 2, 0.1; V_old = 1, 1, 0; R = 2, 0, 0; c = 0.5 -> near V = 1.5, 1.5, 0.1
    values, old, returns = torch.tensor([[2.0, 2.0, 0.1]]), torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[2.0, 0.0, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    result = clipped_value_loss(values, old, returns, mask, 0.5)
    torch.testing.assert_close(result.loss, torch.tensor([[0.125, 2.0, 0.005]]))
    assert result.clipped.tolist() == [[True, False, False]]
    torch.testing.assert_close(clipped_value_loss(values, old, returns, mask, None).loss, torch.tensor([[0.0, 2.0, 0.005]]))


@settings(max_examples=60, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000), clip=st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_matches_the_reference_with_poisoned_masked_slots(mask, seed, clip):
    values, old, returns = (normal(mask, seed + k) for k in range(3))
    leaf = poison(values, mask).requires_grad_()
    result = clipped_value_loss(leaf, poison(old, mask, INF), poison(returns, mask), mask, clip)
    expected = torch.zeros_like(values)
    for row, t in mask.nonzero().tolist():
        expected[row, t] = value_token(float(values[row, t]), float(old[row, t]), float(returns[row, t]), clip)
    torch.testing.assert_close(result.loss.detach(), expected)
    result.loss.sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[~mask] == 0).all()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_loss_gradcheck(clip):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    values, old, returns = (normal(mask, k) for k in range(3))
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old, returns, mask, clip).loss, (values.requires_grad_(),))
