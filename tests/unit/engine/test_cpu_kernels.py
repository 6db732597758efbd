"""The fast product against float64, below and above the size from which it takes another kernel."""

from __future__ import annotations

import pytest
import torch

from megarl.engine.cpu_kernels import MIN_ONEDNN_SIZE, linear, product

SMALL, LARGE = (3, 5, 7), (70, 130, 150)  # M, K, N


def test_sizes_stand_on_both_sides_of_the_threshold():
    assert torch.Size(SMALL).numel() < MIN_ONEDNN_SIZE < torch.Size(LARGE).numel()


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_product(shape: tuple[int, int, int], transposed: bool, biased: bool):
    rows, inner, columns = shape
    torch.manual_seed(0)
    left = torch.randn(inner, rows).t() if transposed else torch.randn(rows, inner)
    right = torch.randn(inner, columns).t() if transposed else torch.randn(columns, inner)
    bias = torch.randn(columns) if biased else None
    expected = left.double() @ right.double().t() + (bias.double() if biased else 0.0)
    torch.testing.assert_close(product(left, right, bias).double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_linear_has_the_gradients_of_torch(shape: tuple[int, int, int], dtype: torch.dtype):
    rows, inner, columns = shape
    torch.manual_seed(0)
    leaves = [torch.randn(size, dtype=dtype).requires_grad_() for size in ((rows, 2, inner), (columns, inner), (columns,))]
    weight = torch.randn(rows, 2, columns, dtype=dtype)
    ours = torch.autograd.grad((linear(*leaves) * weight).sum(), leaves)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad((torch.nn.functional.linear(*doubles) * weight.double()).sum(), doubles)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, reference in zip(ours, expected, strict=True):
        assert float((mine.double() - reference).norm() / reference.norm()) < tolerance


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows_give_no_rows_and_gradients_of_zero(shape: tuple[int, ...]) -> None:
    """An expert without a token, a micro-batch without a row: its ranks must not fail where the others wait for them."""
    hidden, weight, bias = torch.empty(shape, requires_grad=True), torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    output = linear(hidden, weight, bias)
    assert output.shape == (*shape[:-1], 5)
    output.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == shape
    for parameter in (weight, bias):
        assert parameter.grad is not None
        assert not parameter.grad.any()
