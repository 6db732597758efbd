"""The fast product against float64, below and above the size from which it uses another kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.engine import cpu_kernels
from megarl.engine.cpu_kernels import (
    MIN_ONEDNN_SIZE,
    gated_linear,
    linear,
    product,
    product_and_sum,
    product_over_rows,
)

# M, K, N
SMALL = (3, 5, 7)
LARGE = (70, 130, 150)


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


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("by_onednn", [False, True])
def test_product_over_rows(
    shape: tuple[int, int, int], wide: bool, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
):
    """Covers either matrix being wider, and either library, whatever this processor uses."""
    monkeypatch.setattr(cpu_kernels, "WEIGHT_GRADIENTS_BY_ONEDNN", by_onednn)
    rows, few, many = shape
    torch.manual_seed(0)
    left = torch.randn(rows, many if wide else few)
    right = torch.randn(rows, few if wide else many)
    expected = left.double().t() @ right.double()
    torch.testing.assert_close(product_over_rows(left, right).double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_product_and_sum(shape: tuple[int, int, int]):
    rows, inner, columns = shape
    torch.manual_seed(0)
    left = torch.randn(rows, inner)
    right = torch.randn(inner, columns).t()
    summand = torch.randn(rows, columns)
    expected = left.double() @ right.double().t() + summand.double()
    torch.testing.assert_close(product_and_sum(left, right, summand).double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_gated_linear(shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float):
    rows, inner, columns = shape
    torch.manual_seed(0)
    leaves = [
        torch.randn(size, dtype=dtype).requires_grad_() for size in ((rows, 2, inner), (2 * columns, inner))
    ]
    weight = torch.randn(rows, 2, columns, dtype=dtype)
    ours = gated_linear(*leaves)
    gradients = torch.autograd.grad((ours * weight).sum(), leaves)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    gate, up = torch.nn.functional.linear(*doubles).chunk(2, -1)
    expected = torch.nn.functional.silu(gate) * up
    references = torch.autograd.grad((expected * weight.double()).sum(), doubles)

    for mine, wanted in zip((ours, *gradients), (expected, *references), strict=True):
        assert mine.dtype == dtype
        assert float((mine.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.parametrize("of_half_precision", [False, True])
@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("embeds", [False, True])
def test_a_gradient_is_added_to_megatrons_buffer(
    gated: bool, embeds: bool, by_onednn: bool, of_half_precision: bool, monkeypatch: pytest.MonkeyPatch
):
    """The returned tensor is separate: for an embedding, to whose gradient Megatron adds it, it is zero."""
    monkeypatch.setattr(cpu_kernels, "WEIGHT_GRADIENTS_BY_ONEDNN", by_onednn)
    rows, inner, columns = LARGE
    torch.manual_seed(0)
    dtype = torch.bfloat16 if of_half_precision else torch.float32
    hidden = torch.randn(rows, inner, dtype=dtype)
    weight = torch.randn(2 * columns, inner, dtype=dtype).requires_grad_()
    before = torch.randn(2 * columns, inner)
    call = (lambda: gated_linear(hidden, weight)) if gated else (lambda: linear(hidden, weight, None))
    (reference,) = torch.autograd.grad(call().sum(), weight)
    buffered: Any = weight
    buffered.main_grad = before.clone()
    buffered.grad_added_to_main_grad = False
    buffered.zero_out_wgrad = embeds

    for passes in (1, 2):
        (returned,) = torch.autograd.grad(call().sum(), weight)
        added = (buffered.main_grad - before).double()
        assert float((added - passes * reference.double()).norm() / reference.double().norm()) < (
            2e-2 if of_half_precision else 2e-5
        )
        assert buffered.grad_added_to_main_grad
        assert (returned.dtype, returned.shape) == (dtype, weight.shape)
        assert not embeds or not returned.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_linear_has_the_gradients_of_torch(shape: tuple[int, int, int], dtype: torch.dtype):
    rows, inner, columns = shape
    torch.manual_seed(0)
    leaves = [
        torch.randn(size, dtype=dtype).requires_grad_()
        for size in ((rows, 2, inner), (columns, inner), (columns,))
    ]
    weight = torch.randn(rows, 2, columns, dtype=dtype)
    ours = torch.autograd.grad((linear(*leaves) * weight).sum(), leaves)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = torch.autograd.grad((torch.nn.functional.linear(*doubles) * weight.double()).sum(), doubles)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for mine, reference in zip(ours, expected, strict=True):
        assert float((mine.double() - reference).norm() / reference.norm()) < tolerance


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows_give_no_rows_and_gradients_of_zero(shape: tuple[int, ...]) -> None:
    """An expert without a token or a micro-batch without a row must not fail where other ranks wait for it."""
    hidden = torch.empty(shape, requires_grad=True)
    weight = torch.randn(5, 8, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    output = linear(hidden, weight, bias)
    assert output.shape == (*shape[:-1], 5)
    output.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == shape
    gated = torch.randn(6, 8, requires_grad=True)
    activated = gated_linear(hidden, gated)
    assert activated.shape == (*shape[:-1], 3)
    activated.sum().backward()

    for parameter in (weight, bias, gated):
        assert parameter.grad is not None
        assert not parameter.grad.any()
