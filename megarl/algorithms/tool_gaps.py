"""Rows with holes (tool output between two turns) as rows without: valid tokens to the front, and back."""

from __future__ import annotations

import torch
from torch import Tensor


def front_slots(mask: Tensor) -> Tensor | None:
    """(b, R) int64: where each valid token of mask (b, R) goes; R for all others. None where all stand there already."""
    if not (mask[:, 1:] > mask[:, :-1]).any():
        return None
    return torch.where(mask, mask.cumsum(1) - 1, mask.shape[1])


def to_front(x: Tensor, slots: Tensor) -> Tensor:
    """x (b, R) with its valid tokens at the front, in their order, and 0 behind; what is masked must be 0 in x."""
    return x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_(1, slots, x)[:, :-1]


def from_front(x: Tensor, slots: Tensor) -> Tensor:
    """The inverse of `to_front`."""
    return torch.nn.functional.pad(x, (0, 1)).gather(1, slots)
