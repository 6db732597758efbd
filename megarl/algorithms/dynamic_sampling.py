"""Which samples have something to teach: those of prompts whose samples do not all have the same score."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages.groups import Groups
from megarl.algorithms.scores import refuse_unusable


def rows_with_signal(scores: Tensor, uid: np.ndarray) -> Tensor:
    """(B,) bool: whether the scores (B,) of the samples with the row's uid (B,) differ (Yu et al. 2025, arXiv 2503.14476, section 3.2).

    A group without signal has advantages of 0 under every estimator that compares a prompt's samples. A group of one has none.
    Raises ValueError for a score that is NaN or infinite, with its uid.
    """
    return _groups_of(scores, uid).spread(scores) > 0


def group_metrics(scores: Tensor, uid: np.ndarray) -> dict[str, float]:
    """`groups/without_signal`: share of prompts whose samples all have the same score; `groups/at_best`, `groups/at_worst`: share of
    prompts whose samples all have the batch's largest, or smallest, score (where those differ). Nothing for an empty batch."""
    if len(scores) == 0:
        return {}
    groups = _groups_of(scores, uid)
    weight = 1.0 / groups.size  # a prompt counts once, whatever the number of its samples
    flat = groups.spread(scores) == 0
    differ = scores.max() > scores.min()
    shares = {
        "without_signal": flat,
        "at_best": flat & (scores == scores.max()) & differ,
        "at_worst": flat & (scores == scores.min()) & differ,
    }
    return {f"groups/{name}": float((weight * rows).sum() / len(groups.sizes)) for name, rows in shares.items()}


def _groups_of(scores: Tensor, uid: np.ndarray) -> Groups:
    refuse_unusable("the score", scores, uid)
    return Groups.of(uid, torch.ones_like(scores, dtype=torch.bool))
