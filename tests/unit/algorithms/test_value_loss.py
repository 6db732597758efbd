import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import clipped_value_loss
from tests.unit.algorithms.reference import value_token
from tests.unit.algorithms.strategies import masks, normal, poison

INF = float("inf")


def test_value_loss_by_hand():
    # V = 2, 2, 0.1; V_old = 1, 1, 0; R = 2, 0, 0; c = 0.5 -> near V = 1.5, 1.5, 0.1
    values = torch.tensor([[2.0, 2.0, 0.1]])
    old = torch.tensor([[1.0, 1.0, 0.0]])
    returns = torch.tensor([[2.0, 0.0, 0.0]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, clipped = clipped_value_loss(values, old, returns, mask, 0.5)
    torch.testing.assert_close(loss, torch.tensor([[0.125, 2.0, 0.005]]))
    assert clipped.tolist() == [[True, False, False]]
    torch.testing.assert_close(
        clipped_value_loss(values, old, returns, mask, None)[0], torch.tensor([[0.0, 2.0, 0.005]])
    )


@settings(max_examples=60, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000), clip=st.sampled_from([None, 0.2, 1.0]))
def test_value_loss_matches_the_reference_with_poisoned_masked_slots(mask, seed, clip):
    values, old, returns = (normal(mask, seed + k) for k in range(3))
    leaf = poison(values, mask).requires_grad_()
    loss, _ = clipped_value_loss(leaf, poison(old, mask, INF), poison(returns, mask), mask, clip)
    expected = torch.zeros_like(values)

    for row, t in mask.nonzero().tolist():
        expected[row, t] = value_token(
            float(values[row, t]), float(old[row, t]), float(returns[row, t]), clip
        )

    torch.testing.assert_close(loss.detach(), expected)
    loss.sum().backward()
    assert torch.isfinite(leaf.grad).all()
    assert (leaf.grad[~mask] == 0).all()


@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_loss_gradcheck(clip):
    mask = torch.tensor([[True, True, False], [True, True, True]])
    values, old, returns = (normal(mask, k) for k in range(3))
    assert torch.autograd.gradcheck(
        lambda x: clipped_value_loss(x, old, returns, mask, clip)[0], (values.requires_grad_(),)
    )


def test_rounding_is_not_clipping() -> None:
    """Values that moved by less than the bound often do not equal old value + difference bitwise."""
    generator = torch.Generator().manual_seed(0)
    values, old, returns = 0.1 * (2 * torch.rand(3, 1, 1000, generator=generator) - 1)
    assert (old + (values - old) != values).sum() > 50
    _, clipped = clipped_value_loss(values, old, returns, torch.ones(1, 1000, dtype=torch.bool), 0.2)
    assert not clipped.any()
