"""Outcome scores of samples.

The module places them on the last generated token, checks that they are finite, and adds the overlong
penalty.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import (
    as_rows,
    leaves_nothing_out,
    map_tokens,
    of_form,
    row_lengths,
    token_blocks,
)
from megarl.batch.ragged import Column, RaggedTensor
from megarl.config.schema import OverlongConfig


def place_scores(scores: Sequence[float] | Tensor, response_mask: Column) -> Column:
    """Place scores (B,) on the last valid token of each row of response_mask (B, R), with 0 elsewhere.

    Returns:
        `token_level_scores`, (B, R) float32.

    Raises:
        ValueError: A row has no response token, and so no position for its score.
    """
    empty = (row_lengths(response_mask) == 0).nonzero().flatten().tolist()
    if empty:
        raise ValueError(
            f"rows {empty[:8]} of {len(response_mask)} have no response token to place their scores on; a "
            f"response contains at least its end token: check that the rollout returned one for every prompt"
        )

    per_row = torch.as_tensor(scores, dtype=torch.float32)
    rows = as_rows(response_mask)
    # If there are no gaps, a row's last valid token is its last token.
    last = rows.lengths.cumsum(0) - 1

    # If there are gaps, the last valid token of a row may come earlier.
    if not leaves_nothing_out(rows):
        for block in token_blocks(rows):
            assert block.mask is not None
            valid = block.mask.nonzero().flatten() + block.tokens.start
            last[block.rows] = valid[torch.searchsorted(valid, last[block.rows], right=True) - 1]

    values = torch.zeros(rows.num_tokens)  # only pages that are written take memory
    values[last] = per_row
    return of_form(RaggedTensor.packed_rows(values, rows.lengths), response_mask)


def refuse_unusable(name: str, per_row: Tensor, uid: np.ndarray) -> None:
    """Refuse values of `per_row` (B,) that are NaN or infinite.

    Raises:
        ValueError: Contains the uids (B,) of the first such samples.
    """
    rows = (~torch.isfinite(per_row)).nonzero().flatten().tolist()
    if rows:
        shown = ", ".join([*(str(uid[row]) for row in rows[:8]), *(["..."] if len(rows) > 8 else [])])
        raise ValueError(
            f"{name} is {float(per_row[rows[0]])} for {len(rows)} of {len(per_row)} samples (uid {shown}); "
            "each would make every advantage of its group or batch useless: fix the reward function"
        )


def overlong_penalty(lengths: Tensor, max_response_length: int, config: OverlongConfig) -> Tensor:
    """Return DAPO's soft overlong penalty (Yu et al. 2025, arXiv 2503.14476, eq. 13).

    The penalty (B,) of lengths (B,) in tokens is at most 0.

    The penalty is 0 up to max_response_length - buffer_tokens, then decreases linearly to -penalty at
    max_response_length. Without a buffer it is 0 everywhere.
    """
    buffer_tokens = config.buffer_tokens(max_response_length)
    if buffer_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32, device=lengths.device)
    excess = lengths.float() - (max_response_length - buffer_tokens)

    return -config.penalty * (excess / buffer_tokens).clamp(0.0, 1.0)


def penalise_overlong(
    token_level_scores: Column, mask: Column, max_response_length: int, config: OverlongConfig
) -> tuple[Column, dict[str, float]]:
    """Add the overlong penalty to the scores (B, R), on each row's last valid token, and return its metrics.

    The length of a response counts the tokens that the model generated.

    Metrics: `reward/overlong_penalty`, the mean over rows, at most 0; `reward/overlong_fraction`, the
    fraction of rows with a penalty.

    Raises:
        ValueError: A row has no response token, see place_scores.
    """
    penalty = overlong_penalty(row_lengths(mask), max_response_length, config)
    metrics = {
        "reward/overlong_penalty": float(penalty.mean()),
        "reward/overlong_fraction": float((penalty < 0).float().mean()),
    }
    return map_tokens(torch.add, mask, token_level_scores, place_scores(penalty, mask)), metrics
