"""What is done about a rollout engine whose log-probs are not the trainer's: weights, rejected responses, and diagnostics.

A batch is drawn from the rollout engine's policy mu and learnt from by the trainer's policy pi. Shapes: B samples, R padded response
tokens. x_t = old_log_probs - rollout_log_probs = log pi_t - log mu_t; all estimates are over tokens drawn from mu.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.masked import masked
from megarl.config.schema import (
    CorrectionKind,
    CorrectionLevel,
    RejectionConfig,
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrectionConfig,
)


class Correction(NamedTuple):
    """weights: factors of the per-token policy loss (the batch key `rollout_weights`), without a graph, 0 in masked slots; None where
    `level` is none. mask: the response mask without the rows that were rejected.

    A token of weight 0 still counts in the loss's denominator, as importance sampling wants it; a rejected row does not.
    """

    weights: Tensor | None  # (B, R)
    mask: Tensor  # (B, R) bool
    metrics: dict[str, float]


def correct(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> Correction:
    """Weights and rejections for (B, R) log-probs of the same tokens by the trainer and by the rollout engine.

    Weights: pi/mu of each token (`level` token), its product over the response (sequence: exact, of large variance), or its geometric
    mean over the response (geometric: biased, comparable over lengths). `truncate`: at most `high` (truncated importance sampling,
    Ionides 2008). `mask`: 0 outside [low, high], else as it is (masked importance sampling).
    Rejection: see RejectionConfig; k1 to k3 as in kl.py, summed over the response (sequence) or averaged over its tokens (geometric).

    Metrics, beside those of `diagnostics`. `rollout_correction/weight_mean`; `.../effective_sample_size`: (sum w)^2 / (n sum w^2), in
    [1/n, 1]; `.../fraction_truncated` and `.../fraction_masked`: share of weights that were cut, or set to 0. All over tokens at
    token level, else over responses. `.../fraction_rejected`: share of responses.

    Raises ValueError for a log-prob of a valid token that is NaN or infinite.
    """
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask)
    metrics = diagnostics(old_log_probs, rollout_log_probs, mask)
    weights = None
    if config.level is not CorrectionLevel.none:
        raw = _ratios(log_ratio, mask, config.level)
        limited = _limited(raw, config)
        weights = masked(limited.expand_as(mask), mask)
        metrics |= _weight_metrics(raw, limited, mask, config.kind)
    if config.rejection.estimator is not RejectionEstimator.none:
        keep = _accepted(log_ratio, mask, config.rejection)
        rows = mask.any(dim=1)
        metrics["rollout_correction/fraction_rejected"] = _share(~keep, rows)
        mask = mask & keep[:, None]
    return Correction(weights, mask, metrics)


def correction_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """The weights (b, R) of `correct` alone, at any level but none: a row's need no other row. Raises what `correct` raises."""
    raw = _ratios(_log_ratio(old_log_probs, rollout_log_probs, mask), mask, config.level)
    return masked(_limited(raw, config).expand_as(mask), mask)


def diagnostics(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the two policies are apart, for (B, R) log-probs; nothing for a batch without a valid token.

    Over tokens: `rollout_correction/kl_k1`: mean of -x, of KL(mu, pi); `.../kl`: mean of e^x - 1 - x, the same, never negative;
    `.../kl_reverse`: mean of x e^x - e^x + 1, of KL(pi, mu), never negative; `.../chi_square_token`: mean of e^2x, less 1;
    `.../ratio_max` and `.../ratio_min`: of e^x. Over responses: `.../chi_square_sequence`: mean of e^(2 sum x), less 1.

    Exponents are cut at +-20. Raises ValueError for a log-prob of a valid token that is NaN or infinite.
    """
    if not mask.any():
        return {}
    log_ratio = _log_ratio(old_log_probs, rollout_log_probs, mask).double()
    x, sequence = log_ratio[mask], log_ratio.sum(dim=1)[mask.any(dim=1)].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = x.exp()
    values = {
        "kl_k1": -x.mean(),
        "kl": (torch.expm1(x) - x).mean(),
        "kl_reverse": (x * ratio - torch.expm1(x)).mean(),
        "chi_square_token": (2 * x).exp().mean() - 1,
        "chi_square_sequence": (2 * sequence).exp().mean() - 1,
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
    }
    return {f"rollout_correction/{name}": float(value) for name, value in values.items()}


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    log_ratio = masked(old_log_probs.detach(), mask) - masked(rollout_log_probs, mask)
    rows = (~torch.isfinite(log_ratio)).any(dim=1).nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"old_log_probs or rollout_log_probs of rows {rows[:8]} (of {len(mask)}) are not finite, so the rollout cannot be corrected: "
            "check that the rollout engine samples from the whole vocabulary (top_p=1, top_k=-1) and reports log-probs"
        )
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _at_level(log_ratio: Tensor, mask: Tensor, level: CorrectionLevel) -> Tensor:
    """(B, R) for tokens, (B, 1) for responses; 0 for a row without a token."""
    if level is CorrectionLevel.token:
        return log_ratio
    total = log_ratio.sum(dim=1, keepdim=True)
    return total if level is CorrectionLevel.sequence else total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _ratios(log_ratio: Tensor, mask: Tensor, level: CorrectionLevel) -> Tensor:
    """pi / mu, (B, R) for tokens, (B, 1) for responses."""
    return _at_level(log_ratio, mask, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _limited(raw: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    if config.kind is CorrectionKind.truncate:
        return raw.clamp(max=config.high)
    return torch.where((raw >= config.low) & (raw <= config.high), raw, 0.0)


def _weight_metrics(raw: Tensor, limited: Tensor, mask: Tensor, kind: CorrectionKind) -> dict[str, float]:
    """Of ratios and weights (B, R) or (B, 1)."""
    name = "fraction_truncated" if kind is CorrectionKind.truncate else "fraction_masked"
    units = mask if raw.shape == mask.shape else mask.any(dim=1, keepdim=True)
    counted = masked(limited, units).double()
    num_units, squares = units.sum().clamp(min=1), counted.square().sum()
    return {
        "rollout_correction/weight_mean": float(counted.sum() / num_units),
        "rollout_correction/effective_sample_size": float(counted.sum().square() / (num_units * squares)) if squares > 0 else 0.0,
        f"rollout_correction/{name}": _share(limited != raw, units),
    }


def _accepted(log_ratio: Tensor, mask: Tensor, config: RejectionConfig) -> Tensor:
    """(B,) bool."""
    estimate = {
        RejectionEstimator.k1: -log_ratio,
        RejectionEstimator.k2: 0.5 * log_ratio.square(),
        RejectionEstimator.k3: torch.expm1(log_ratio) - log_ratio,
    }[config.estimator].sum(dim=1)
    if config.level is RejectionLevel.geometric:
        estimate = estimate / mask.sum(dim=1).clamp(min=1)
    accepted = estimate <= config.high
    return accepted if config.low is None else accepted & (estimate >= config.low)


def _share(condition: Tensor, units: Tensor) -> float:
    return float((condition & units).sum() / units.sum().clamp(min=1))
