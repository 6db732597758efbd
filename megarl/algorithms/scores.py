"""Where an outcome score stands in a batch: on the last token that the model wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def place_scores(scores: Sequence[float] | Tensor, response_mask: Tensor) -> Tensor:
    """`token_level_scores` (B, R) float32: scores (B,) on the last True token of each row of response_mask (B, R), else 0.

    Raises ValueError for a row without a response token, which has no place for its score.
    """
    empty = (~response_mask.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"rows {empty[:8]} of {len(response_mask)} have no response token, so their scores have no place; "
            "a response holds at least its end token: check that the rollout returned one for every prompt"
        )
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(dim=1, keepdim=True)
    column = torch.as_tensor(scores, dtype=torch.float32, device=response_mask.device)[:, None]
    return torch.zeros(response_mask.shape, dtype=torch.float32, device=response_mask.device).scatter_(1, last, column)


def refuse_unusable(name: str, per_row: Tensor, uid: np.ndarray) -> None:
    """Raises ValueError where a value of `per_row` (B,) is NaN or infinite, with the uids (B,) of the first such samples."""
    rows = (~torch.isfinite(per_row)).nonzero().flatten().tolist()
    if rows:
        shown = ", ".join([*(str(uid[row]) for row in rows[:8]), *(["..."] if len(rows) > 8 else [])])
        raise ValueError(
            f"{name} is {float(per_row[rows[0]])} for {len(rows)} of {len(per_row)} samples (uid {shown}); "
            "one of them would make every advantage of its group or batch useless: mend the reward function"
        )
