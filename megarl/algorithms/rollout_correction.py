"""Corrects for a rollout engine whose log-probs differ from the trainer's.

The module computes importance weights, rejected responses, and diagnostics.

A batch is sampled from the rollout engine's policy mu and trains the trainer's policy pi. Shapes: B samples,
R padded response tokens. x_t = old_log_probs - rollout_log_probs = log pi_t - log mu_t. All estimates are
over tokens sampled from mu.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.masked import (
    TokenBlock,
    empty_like,
    masked,
    of_form,
    row_lengths,
    token_blocks,
)
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
    """The correction of a batch.

    A token with weight 0 still counts in the loss's denominator, as importance sampling requires; a rejected
    one does not.

    Attributes:
        weights: Factors of the per-token policy loss (the batch key `rollout_weights`), without a gradient, 0
            in masked slots. None if `level` is none.
        mask: The response mask without the rejected rows or tokens.
    """

    weights: Column | None  # (B, R)
    mask: Column  # (B, R) bool
    metrics: dict[str, float]


def correct(
    old_log_probs: Column, rollout_log_probs: Column, mask: Column, config: RolloutCorrectionConfig
) -> Correction:
    """Compute importance weights and rejections.

    The inputs are the log-probs (B, R) of the same tokens by the trainer and by the rollout engine.

    Weights, by `level`:

    - token: pi/mu of each token.
    - sequence: the product of pi/mu over the response. It is exact and has a large variance.
    - geometric: the geometric mean of pi/mu over the response. It is biased, and comparable between lengths.

    Limits, by `kind`:

    - truncate: weights are at most `high` (truncated importance sampling, Ionides 2008).
    - mask: weights outside [low, high] become 0; others are unchanged (masked importance sampling).

    Rejection: see RejectionConfig. The estimators k1 to k3 of kl.py are summed over the response (sequence),
    averaged over its tokens (geometric), or read at each token (token). With `batch`, the tokens with the
    largest estimates are rejected until the mean over the other tokens of the batch is at most `high`. By k2,
    half of the squared log-ratio, this is the mask of M2PO (Zheng et al. 2025, arXiv 2510.01161).

    Metrics, in addition to those of `diagnostics`, over tokens at token level and over responses otherwise:

    - `rollout_correction/weight_mean`.
    - `rollout_correction/effective_sample_size`: (sum w)^2 / (n sum w^2), in [1/n, 1].
    - `rollout_correction/fraction_truncated`, `rollout_correction/fraction_masked`: fraction of weights that
      were limited, or set to 0.
    - `rollout_correction/fraction_rejected`: fraction of responses, or of tokens, that were rejected.

    Raises:
        ValueError: A log-prob of a valid token is NaN or infinite.
    """
    metrics = diagnostics(old_log_probs, rollout_log_probs, mask)
    weights = None
    kept = mask

    if config.level is not CorrectionLevel.none:
        weights, totals = _weights(old_log_probs, rollout_log_probs, mask, config)
        metrics |= _weight_metrics(totals, config.kind)

    if config.rejection.estimator is not RejectionEstimator.none:
        kept, rejected = _kept(old_log_probs, rollout_log_probs, mask, config.rejection)
        metrics["rollout_correction/fraction_rejected"] = rejected

    return Correction(weights, kept, metrics)


def _log_ratios(
    old_log_probs: Column, rollout_log_probs: Column, mask: Column
) -> Iterator[tuple[TokenBlock, Tensor]]:
    """Yield all rows in blocks, with x of each token (n,).

    x is clamped as in `diagnostics`, and 0 where the mask is False.
    """
    for block in token_blocks(mask, old_log_probs, rollout_log_probs):
        yield block, block.only_valid(torch.sub(*block.columns)).clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _weights(
    old_log_probs: Column, rollout_log_probs: Column, mask: Column, config: RolloutCorrectionConfig
) -> tuple[Column, Tensor]:
    """Return the weights, and totals (4,) float64 over tokens or responses.

    These are the number of weights, their sum, that of their squares, and the number that was limited.
    """
    weights = empty_like(mask, old_log_probs.dtype)
    totals = torch.zeros(4, dtype=torch.float64)
    num_tokens = row_lengths(mask)

    for block, log_ratio in _log_ratios(old_log_probs, rollout_log_probs, mask):
        if config.level is CorrectionLevel.token:
            raw = log_ratio.exp()
            limited = of_tokens = _limited(raw, config)
            raw = block.valid(raw)
            limited = block.valid(limited)
        else:
            counts = num_tokens[block.rows]
            raw = _of_sequence(block.row_sums(log_ratio), counts, config.level)
            limited = _limited(raw, config)
            # A response has one weight, which applies to each of its tokens.
            of_tokens = limited.repeat_interleave(block.lengths)
            # A response without tokens has a weight of 1 by the formula, and must not count.
            raw = raw[counts > 0]
            limited = limited[counts > 0]
        weights.values[block.tokens] = block.only_valid(of_tokens)
        # Sums over millions of tokens lose digits in float32.
        exact = limited.double()
        of_block = len(exact), float(exact.sum()), float(torch.dot(exact, exact)), int((limited != raw).sum())
        totals += torch.tensor(of_block, dtype=torch.float64)

    return of_form(weights, mask), totals


def _of_sequence(total: Tensor, num_tokens: Tensor, level: CorrectionLevel) -> Tensor:
    """Return the ratios of responses from the sums of x over their tokens."""
    mean = total if level is CorrectionLevel.sequence else total / num_tokens.clamp(min=1)
    return mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _weight_metrics(totals: Tensor, kind: CorrectionKind) -> dict[str, float]:
    number, weights, squares, changed = totals.tolist()
    name = "fraction_truncated" if kind is CorrectionKind.truncate else "fraction_masked"
    count = max(number, 1.0)
    # The effective sample size is Kish's, as a share of the tokens.
    return {
        "rollout_correction/weight_mean": weights / count,
        "rollout_correction/effective_sample_size": weights**2 / (count * squares) if squares > 0 else 0.0,
        f"rollout_correction/{name}": changed / count,
    }


def correction_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, config: RolloutCorrectionConfig
) -> Tensor:
    """Return only the weights of `correct`, (b, R), at any level except none.

    A row's weights depend on no other row.

    This works without host-device synchronization, so NaN or infinite log-probs are not refused and propagate
    to the weights.
    """
    log_ratio = masked(old_log_probs.detach(), mask) - masked(rollout_log_probs, mask)
    # Use the same bounds as `correct`, so that both compute the same weights.
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    if config.level is CorrectionLevel.token:
        raw = log_ratio.exp()
    else:
        raw = _of_sequence(log_ratio.sum(dim=1, keepdim=True), mask.sum(dim=1, keepdim=True), config.level)

    return masked(_limited(raw, config).expand_as(mask), mask)


def diagnostics(old_log_probs: Column, rollout_log_probs: Column, mask: Column) -> dict[str, float]:
    """Return measures of the difference between the two policies from their log-probs (B, R).

    There are no metrics for a batch without a valid token.

    Over tokens:

    - `rollout_correction/kl_k1`: mean of -x, an estimate of KL(mu, pi).
    - `rollout_correction/kl`: mean of e^x - 1 - x, of the same KL, never negative.
    - `rollout_correction/kl_reverse`: mean of x e^x - e^x + 1, of KL(pi, mu), never negative.
    - `rollout_correction/chi_square_token`: mean of e^2x, minus 1.
    - `rollout_correction/ratio_max`, `rollout_correction/ratio_min`: of e^x.

    Over responses:

    - `rollout_correction/chi_square_sequence`: mean of e^(2 sum x), minus 1.

    Exponents are clamped to [-20, 20].

    Raises:
        ValueError: A log-prob of a valid token is NaN or infinite.
    """
    refuse_unusable_log_probs(mask, old_log_probs, rollout_log_probs)
    sums = torch.zeros(4, dtype=torch.float64)
    count = 0
    high = 0.0
    low = math.inf
    sequences = torch.empty(len(mask))

    for block, log_ratio in _log_ratios(old_log_probs, rollout_log_probs, mask):
        sequences[block.rows] = block.row_sums(log_ratio).float()
        x = block.valid(log_ratio).double()
        if len(x):
            # expm1 keeps the digits of a small x, which e^x - 1 would lose.
            less_one = torch.expm1(x)
            ratio = less_one + 1
            sums += torch.stack(
                [-x.sum(), (less_one - x).sum(), (x * ratio).sub_(less_one).sum(), torch.dot(ratio, ratio)]
            )
            smallest, largest = ratio.aminmax()
            count = count + len(x)
            high = max(high, float(largest))
            low = min(low, float(smallest))

    if count == 0:
        return {}
    k1, k3, reverse, square = (sums / count).tolist()
    has_tokens = row_lengths(mask) > 0
    # The sum over a response may exceed the limit that each of its tokens respects.
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


def refuse_unusable_log_probs(mask: Column, *log_probs: Column) -> None:
    """Refuse log-probs of valid tokens that are NaN or infinite.

    Args:
        log_probs: `old_log_probs`, `rollout_log_probs`, or both.

    Raises:
        ValueError: Names the rows with such values.
    """
    unusable = []
    for block in token_blocks(mask, *log_probs):
        for column in block.columns:
            valid = block.only_valid(column)
            if not math.isfinite(float(valid.sum())):  # a sum is finite only if all its values are
                rows = (~torch.isfinite(block.row_sums(valid))).nonzero().flatten() + block.rows.start
                unusable += rows.tolist()

    if unusable:
        raise ValueError(
            f"old_log_probs or rollout_log_probs of rows {sorted(set(unusable))[:8]} (of {len(mask)}) are "
            "not finite, so the rollout cannot be corrected: check that the rollout engine samples from the "
            "whole vocabulary (top_p=1, top_k=-1) and reports log-probs"
        )


def _limited(raw: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    if config.kind is CorrectionKind.truncate:
        return raw.clamp(max=config.high)
    return torch.where((raw >= config.low) & (raw <= config.high), raw, 0.0)


def _kept(
    old_log_probs: Column, rollout_log_probs: Column, mask: Column, config: RejectionConfig
) -> tuple[Column, float]:
    """Return the mask (B, R) without what is rejected, and the fraction of responses or tokens rejected."""
    # Schulman's estimators of KL(rollout || old), with x = log old - log rollout.
    value = {
        RejectionEstimator.k1: torch.neg,
        RejectionEstimator.k2: lambda x: 0.5 * x.square(),
        RejectionEstimator.k3: lambda x: torch.expm1(x) - x,
    }[config.estimator]
    low = -math.inf if config.low is None else config.low
    high = config.high
    if config.level is RejectionLevel.batch:
        ratios = _log_ratios(old_log_probs, rollout_log_probs, mask)
        high = _largest_kept((block.valid(value(log_ratio)) for block, log_ratio in ratios), config.high)
    kept = empty_like(mask, torch.bool)
    num_tokens = row_lengths(mask)
    num_accepted = num_counted = 0

    for block, log_ratio in _log_ratios(old_log_probs, rollout_log_probs, mask):
        estimate = value(log_ratio)
        if config.level in (RejectionLevel.token, RejectionLevel.batch):
            of_tokens = (estimate >= low) & (estimate <= high)
            accepted = block.valid(of_tokens)
        else:
            counts = num_tokens[block.rows]
            estimate = block.row_sums(estimate)
            if config.level is RejectionLevel.geometric:
                estimate = estimate / counts.clamp(min=1)
            accepted = (estimate >= low) & (estimate <= high)
            # A rejected response loses all its tokens, not only those with the largest differences.
            of_tokens = accepted.repeat_interleave(block.lengths)
            accepted = accepted[counts > 0]
        kept.values[block.tokens] = block.only_valid(of_tokens)
        num_accepted += int(accepted.sum())
        num_counted += len(accepted)

    return of_form(kept, mask), (num_counted - num_accepted) / max(num_counted, 1)


def _largest_kept(values: Iterable[Tensor], highest_mean: float) -> float:
    """Return the largest value that is kept if the largest ones are dropped until the mean is at most that.

    Equal values are kept or dropped together, so that the result does not depend on their order. It is
    infinite if none is dropped.

    Args:
        values: Parts (n,) of all values, none of which is negative.
    """
    num_small = 0
    sum_of_small = 0.0
    # Without a larger value, the mean cannot be larger.
    large = [torch.empty(0, dtype=torch.float64)]
    for part in values:
        exact = part.double()
        is_large = exact > highest_mean
        large.append(exact[is_large])
        num_small += len(exact) - len(large[-1])
        sum_of_small += float(exact[~is_large].sum())

    # Each further value raises the mean. Adding them in this order loses the least to rounding.
    rising = torch.cat(large).sort().values
    means = (sum_of_small + rising.cumsum(0)) / (num_small + torch.arange(1, len(rising) + 1))
    num_kept = int((means <= highest_mean).sum())
    if num_kept == len(rising):
        return math.inf

    kept = rising[rising < rising[num_kept]]
    return float(kept[-1]) if len(kept) else highest_mean
