"""The fast product against float64, below and above the size from which it takes another kernel."""

from __future__ import annotations

import pytest
import torch

from megarl.engine.linear import MIN_ONEDNN_SIZE, linear, product

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
