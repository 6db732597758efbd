"""The critic's loss per token: squared error with the new value kept near the old one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masked import masked


class ValueLoss(NamedTuple):
    """Both (b, R), 0 (or False) in masked slots."""

    loss: Tensor
    clipped: Tensor  # bool: the clipped term is the larger one


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float | None) -> ValueLoss:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), all (b, R); without `clip`, 1/2 (V - R)^2."""
    values, old_values, returns = masked(values, mask), masked(old_values, mask), masked(returns, mask)
    plain = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(mask))
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, bounded), bounded > plain)
