"""The kernels that make Megatron fast on a CPU: matrix products of linear layers by oneDNN or MKL, and the gated activation between them.

Which library multiplies follows from the shapes and the processor's maker, never from a clock: a run that is resumed has the same bits.
Both round alike, in float32. Measured in GFLOP/s of a core, MKL, which is torch's own, against oneDNN, for the shapes of small models:

                              outputs and gradients of inputs      gradients of weights
    AMD Zen 5                   100 against 220                    as outputs
    AMD Zen 4                   83 to 101 against 92 to 109        91 to 101 against 75 to 103
    Intel with AVX-512          about the same                     136 against 81

oneDNN is in torch as the operator that torch.compile emits for linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.machine.processors import INTEL, processor_vendor

# Multiplications of a product from which oneDNN, whose calls cost 15 microseconds more, is the faster one.
MIN_ONEDNN_SIZE = 2**20
HAS_ONEDNN = torch.backends.mkldnn.is_available()
WEIGHT_GRADIENTS_BY_ONEDNN = HAS_ONEDNN and processor_vendor() != INTEL


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K), right (N, K), bias (N,) -> left @ right.T + bias (M, N). Either matrix may be transposed in memory. Has no gradient."""
    if _by_onednn(left, left.shape[0] * right.numel()):
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return F.linear(left, right, bias)


def product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """left (R, M), right (R, N) -> left.T @ right (M, N), of which a transpose may be in memory. Has no gradient."""
    if not WEIGHT_GRADIENTS_BY_ONEDNN:
        return left.t() @ right
    if _by_onednn(left, left.numel() * right.shape[1]) and left.shape[1] > right.shape[1]:
        return product(right.t(), left.t()).t()  # oneDNN copies the one on its left, unless it stands in order
    return product(left.t(), right.t())


def _by_onednn(matrix: Tensor, size: int) -> bool:
    return size >= MIN_ONEDNN_SIZE and HAS_ONEDNN and matrix.device.type == "cpu" and matrix.dtype == torch.float32


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden.flatten(0, -2), weight, bias).view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2).contiguous()
        return (
            product(rows, weight.t()).view_as(hidden) if need_hidden else None,
            product_over_rows(rows, hidden.flatten(0, -2)) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden (..., K), weight (N, K), bias (N,) -> (..., N): `torch.nn.functional.linear` on `product`."""
    return _Linear.apply(hidden, weight, bias)


class _SwiGLU(torch.autograd.Function):
    """Keeps what it is given and nothing else. Of the gradient both halves are written where they belong: as tensors of their own, put
    together afterwards, they would take as long as all other steps."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, -1)
        gradients = torch.empty_like(gate_and_up)
        grad_gate, grad_up = gradients.chunk(2, -1)
        activated = F.silu(gate)
        torch.mul(gradient, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(torch.mul(gradient, up, out=activated), gate, grad_input=grad_gate)
        return gradients


def swiglu(gate_and_up: Tensor) -> Tensor:
    """(..., 2 I), first all of the gate, then what it lets through -> silu(gate) * up (..., I)."""
    return _SwiGLU.apply(gate_and_up)
