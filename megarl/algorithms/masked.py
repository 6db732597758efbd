"""Reductions over the valid tokens of a batch; what stands in a masked slot, NaN and infinity included, never counts."""

from __future__ import annotations

import torch
from torch import Tensor


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with 0 where `mask` is False. Unlike `x * mask`, a masked NaN reaches neither the value nor the gradient."""
    return torch.where(mask, x, 0.0)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x (B, R) over the True tokens of mask (B, R), a scalar; 0 when no token is True."""
    return masked(x, mask).sum() / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over the True tokens of mask, both (B, R); 0 in masked slots.

    The variance is the unbiased one (divided by n - 1). With a single valid token it is taken as 0, so the result is 0.
    """
    mean = masked_mean(x, mask)
    deviation = masked(x - mean, mask)
    variance = deviation.square().sum() / (mask.sum() - 1).clamp(min=1)
    return deviation * torch.rsqrt(variance + epsilon)
