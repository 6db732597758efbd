"""What is done about a rollout engine whose log-probs are not the trainer's: weights, rejected responses, and diagnostics.

A batch is drawn from the rollout engine's policy mu and learnt from by the trainer's policy pi. Shapes: B samples, R padded response
tokens. x_t = old_log_probs - rollout_log_probs = log pi_t - log mu_t; all estimates are over tokens drawn from mu.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.masked import empty_like, map_tokens, masked, masked_row_sums, row_blocks, row_lengths, rows_of, tokens_of
from megarl.batch.ragged import Column
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

    weights: Column | None  # (B, R)
    mask: Column  # (B, R) bool
    metrics: dict[str, float]


def correct(old_log_probs: Column, rollout_log_probs: Column, mask: Column, config: RolloutCorrectionConfig) -> Correction:
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
    metrics = diagnostics(old_log_probs, rollout_log_probs, mask)
    weights = None if config.level is CorrectionLevel.none else empty_like(mask, old_log_probs.dtype)
    has_rejection = config.rejection.estimator is not RejectionEstimator.none
    kept = empty_like(mask, torch.bool) if has_rejection else mask
    totals, num_rejected, num_rows = _WeightTotals(), 0, 0
    for rows in row_blocks(mask):
        valid = mask[rows]
        log_ratio = _log_ratio(old_log_probs[rows], rollout_log_probs[rows], valid)
        if weights is not None:
            raw = _ratios(log_ratio, valid, config.level)
            limited = _limited(raw, config)
            weights[rows] = masked(limited.expand_as(valid), valid)
            totals = totals.with_block(raw, limited, valid)
        if has_rejection:
            accepted, has_tokens = _accepted(log_ratio, valid, config.rejection), valid.any(dim=1)
            kept[rows] = valid & accepted[:, None]
            num_rejected, num_rows = num_rejected + int((~accepted & has_tokens).sum()), num_rows + int(has_tokens.sum())
    if weights is not None:
        metrics |= totals.metrics(config.kind)
    if has_rejection:
        metrics["rollout_correction/fraction_rejected"] = num_rejected / max(num_rows, 1)
    return Correction(weights, kept, metrics)


class _WeightTotals(NamedTuple):
    """Over tokens or responses."""

    number: int = 0
    weights: float = 0.0
    squares: float = 0.0
    changed: int = 0

    def with_block(self, raw: Tensor, limited: Tensor, mask: Tensor) -> _WeightTotals:
        """Of ratios and weights (b, r) or (b, 1)."""
        units = mask if raw.shape == mask.shape else mask.any(dim=1, keepdim=True)
        counted = masked(limited, units).double()
        return _WeightTotals(
            self.number + int(units.sum()),
            self.weights + float(counted.sum()),
            self.squares + float(counted.square().sum()),
            self.changed + int(((limited != raw) & units).sum()),
        )

    def metrics(self, kind: CorrectionKind) -> dict[str, float]:
        name, count = "fraction_truncated" if kind is CorrectionKind.truncate else "fraction_masked", max(self.number, 1)
        return {
            "rollout_correction/weight_mean": self.weights / count,
            "rollout_correction/effective_sample_size": self.weights**2 / (count * self.squares) if self.squares > 0 else 0.0,
            f"rollout_correction/{name}": self.changed / count,
        }


def correction_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    """The weights (b, R) of `correct` alone, at any level but none: a row's need no other row. Raises what `correct` raises."""
    _refuse_unusable(old_log_probs.detach(), rollout_log_probs, mask)
    raw = _ratios(_log_ratio(old_log_probs, rollout_log_probs, mask), mask, config.level)
    return masked(_limited(raw, config).expand_as(mask), mask)


def diagnostics(old_log_probs: Column, rollout_log_probs: Column, mask: Column) -> dict[str, float]:
    """How far the two policies are apart, for (B, R) log-probs; nothing for a batch without a valid token.

    Over tokens: `rollout_correction/kl_k1`: mean of -x, of KL(mu, pi); `.../kl`: mean of e^x - 1 - x, the same, never negative;
    `.../kl_reverse`: mean of x e^x - e^x + 1, of KL(pi, mu), never negative; `.../chi_square_token`: mean of e^2x, less 1;
    `.../ratio_max` and `.../ratio_min`: of e^x. Over responses: `.../chi_square_sequence`: mean of e^(2 sum x), less 1.

    Exponents are cut at +-20. Raises ValueError for a log-prob of a valid token that is NaN or infinite.
    """
    _refuse_unusable(old_log_probs, rollout_log_probs, mask)
    sums, count, high, low = torch.zeros(4, dtype=torch.float64), 0, 0.0, math.inf
    sequences = torch.empty(len(mask))
    for rows in row_blocks(mask):
        old, rollout, valid = (rows_of(x, rows) for x in (old_log_probs, rollout_log_probs, mask))
        log_ratio = map_tokens(_log_ratio, old, rollout, valid)
        sequences[rows] = masked_row_sums(log_ratio, valid).float()
        x = tokens_of(log_ratio)[tokens_of(valid)].double()
        if len(x):
            less_one = torch.expm1(x)
            ratio = less_one + 1
            sums += torch.stack([-x.sum(), (less_one - x).sum(), (x * ratio - less_one).sum(), ratio.square().sum()])
            count, high, low = count + len(x), max(high, float(ratio.max())), min(low, float(ratio.min()))
    if count == 0:
        return {}
    k1, k3, reverse, square = (sums / count).tolist()
    has_tokens = row_lengths(mask) > 0
    sequences = sequences[has_tokens].double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = {
        "kl_k1": k1,
        "kl": k3,
        "kl_reverse": reverse,
        "chi_square_token": square - 1,
        "chi_square_sequence": float((2 * sequences).exp().mean()) - 1,
        "ratio_max": high,
        "ratio_min": low,
    }
    return {f"rollout_correction/{name}": value for name, value in values.items()}


def _refuse_unusable(old_log_probs: Column, rollout_log_probs: Column, mask: Column) -> None:
    """A row's sum is finite where all its values are."""
    sums = masked_row_sums(old_log_probs, mask) - masked_row_sums(rollout_log_probs, mask)
    if unusable := (~torch.isfinite(sums)).nonzero().flatten().tolist():
        raise ValueError(
            f"old_log_probs or rollout_log_probs of rows {unusable[:8]} (of {len(mask)}) are not finite, so the rollout cannot be "
            "corrected: check that the rollout engine samples from the whole vocabulary (top_p=1, top_k=-1) and reports log-probs"
        )


def _log_ratio(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    log_ratio = masked(old_log_probs.detach(), mask) - masked(rollout_log_probs, mask)
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
