"""The kernel that makes Megatron fast on a CPU: matrix products of linear layers by oneDNN.

torch multiplies float32 matrices on a CPU with MKL, which leaves half of an AMD processor unused (measured on Zen 5: 100
against oneDNN's 220 GFLOP/s per core; both round alike, in float32). oneDNN is in torch already, as the operator that
torch.compile emits for linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Multiplications of a product from which oneDNN, whose calls cost 15 microseconds more, is the faster one.
MIN_ONEDNN_SIZE = 2**20
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left (M, K), right (N, K), bias (N,) -> left @ right.T + bias (M, N). Either matrix may be transposed in memory. Has no gradient."""
    large = left.shape[0] * right.numel() >= MIN_ONEDNN_SIZE
    if large and _HAS_ONEDNN and left.device.type == "cpu" and left.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return F.linear(left, right, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden.flatten(0, -2), weight, bias).view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2).contiguous()
        return (
            product(rows, weight.t()).view_as(hidden) if need_hidden else None,
            product(rows.t(), hidden.flatten(0, -2).t()) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """hidden (..., K), weight (N, K), bias (N,) -> (..., N): `torch.nn.functional.linear` on `product`."""
    return _Linear.apply(hidden, weight, bias)
