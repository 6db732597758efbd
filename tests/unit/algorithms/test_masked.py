import pytest
import torch

from megarl.algorithms.masked import masked, masked_mean, whiten

NAN = float("nan")


def test_masked_mean_by_hand():
    assert masked_mean(torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()) == 3.0


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool)) == 0.0


def test_whiten_by_hand():
    # values 1, 2, 6: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
    out = whiten(torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool())
    root = 7**0.5
    torch.testing.assert_close(out, torch.tensor([[-2 / root, -1 / root, 0.0], [3 / root, 0.0, 0.0]]))


@pytest.mark.parametrize("num_valid", [0, 1])
def test_whiten_of_one_token_or_none_is_zero(num_valid):
    mask = torch.zeros(1, 3, dtype=torch.bool)
    mask[0, :num_valid] = True
    assert torch.equal(whiten(torch.tensor([[5.0, NAN, NAN]]), mask), torch.zeros(1, 3))


def test_gradient_of_a_masked_nan_is_zero():
    x = torch.tensor([[1.0, NAN]], requires_grad=True)
    masked(x, torch.tensor([[True, False]])).square().sum().backward()
    assert x.grad.tolist() == [[2.0, 0.0]]
