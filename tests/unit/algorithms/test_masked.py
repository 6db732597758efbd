import pytest
import torch

from megarl.algorithms.masked import masked, masked_mean, moments, whiten

NAN = float("nan")


def test_masked_mean_by_hand():
    assert (
        masked_mean(
            torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
        )
        == 3.0
    )


def test_masked_mean_of_nothing_is_zero():
    assert masked_mean(torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool)) == 0.0


def test_moments_by_hand():
    # 1, 2, 6: mean 3, squared deviations 4, 1, 9
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    found = moments(torch.neg, mask, torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]))
    assert found == (3, -3.0, pytest.approx(14 / 3), -1.0, -6.0)
    assert moments(torch.neg, mask, torch.full((2, 3), 0.1)).variance == 0.0
    huge = moments(torch.neg, torch.ones(1, 3, dtype=torch.bool), 1e7 + torch.tensor([[1.0, 2.0, 3.0]]))
    assert huge.variance == pytest.approx(2 / 3)


def test_what_is_read_is_not_written():
    """This includes float64 inputs, the dtype in which moments are summed."""
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    whiten(x, mask)
    assert x.tolist() == [[1.0, 2.0]]
    assert whiten(x, mask, out=x) is not None
    assert x.sum() == 0.0


def test_whiten_by_hand():
    # values 1, 2, 6: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
    out = whiten(
        torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    )
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
