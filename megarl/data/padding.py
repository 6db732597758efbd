"""Rows of token ids as padded tensors: prompts to the left, responses to the right, and both joined.

Shapes: B rows, P padded prompt length, R padded response length, S = P + R. Masks come from lengths, never from ids, so a pad
token that equals the end token is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor


class Padded(NamedTuple):
    ids: Tensor  # int64
    mask: Tensor  # int64, 1 where there is a token


def pad_left(rows: Sequence[Sequence[int] | np.ndarray], width: int, pad_id: int) -> Padded:
    """(B, width); each row ends at the right edge."""
    padded = pad_right([row[::-1] for row in rows], width, pad_id)
    return Padded(padded.ids.flip(1), padded.mask.flip(1))


def pad_right(rows: Sequence[Sequence[int] | np.ndarray], width: int, pad_id: int) -> Padded:
    """(B, width); each row begins at the left edge."""
    assert all(len(row) <= width for row in rows)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    mask = torch.arange(width)[None, :] < lengths[:, None]
    ids = torch.full((len(rows), width), pad_id)
    ids[mask] = flat(rows, np.int64)
    return Padded(ids, mask.long())


def flat(rows: Sequence[Sequence[float] | np.ndarray], dtype: DTypeLike) -> Tensor:
    """What all rows hold, one behind the other."""
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *(np.asarray(row, dtype) for row in rows)]))


def position_ids(attention_mask: Tensor) -> Tensor:
    """(B, S) int64: the number of tokens before each token; 0 on the padding to the left."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def join(prompts: Padded, responses: Padded) -> dict[str, Tensor]:
    """`prompts` (B, P), `responses` (B, R) and, of both side by side, `input_ids`, `attention_mask`, `position_ids` (B, S)."""
    attention_mask = torch.cat([prompts.mask, responses.mask], dim=1)
    return {
        "prompts": prompts.ids,
        "responses": responses.ids,
        "input_ids": torch.cat([prompts.ids, responses.ids], dim=1),
        "attention_mask": attention_mask,
        "position_ids": position_ids(attention_mask),
    }
