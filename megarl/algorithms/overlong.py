"""A penalty for responses that come close to the length limit, so that a cut-off is no surprise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.scores import place_scores
from megarl.config.schema import OverlongConfig


class ShapedScores(NamedTuple):
    token_level_scores: Tensor  # (B, R)
    metrics: dict[str, float]


def overlong_penalty(lengths: Tensor, max_response_length: int, config: OverlongConfig) -> Tensor:
    """(B,), 0 or less, for lengths (B,) in tokens: DAPO's soft over-long punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13).

    0 up to max_response_length - buffer_tokens, then falling in a straight line to -penalty at max_response_length. Without a buffer
    it is 0 everywhere.
    """
    buffer_tokens = config.buffer_tokens(max_response_length)
    if buffer_tokens == 0:
        return torch.zeros(lengths.shape, dtype=torch.float32, device=lengths.device)
    excess = lengths.float() - (max_response_length - buffer_tokens)
    return -config.penalty * (excess / buffer_tokens).clamp(0.0, 1.0)


def penalise_overlong(token_level_scores: Tensor, mask: Tensor, max_response_length: int, config: OverlongConfig) -> ShapedScores:
    """The scores (B, R) with the penalty on each row's last token; a response's length counts the tokens that the model wrote.

    Metrics: `reward/overlong_penalty`, the mean over rows, 0 or less; `reward/overlong_fraction`, the share of rows with one.
    Raises ValueError for a row without a response token, as `place_scores`.
    """
    penalty = overlong_penalty(mask.sum(dim=1), max_response_length, config)
    metrics = {"reward/overlong_penalty": float(penalty.mean()), "reward/overlong_fraction": float((penalty < 0).float().mean())}
    return ShapedScores(token_level_scores + place_scores(penalty, mask).to(token_level_scores.dtype), metrics)
