"""Per-token policy losses, with their inputs and outputs. The dictionary lists all of them.

Most are based on the ratio of new to old probability, which is clipped per token, averaged over a response,
or limited in another way. The loss dro penalizes its logarithm, and gpg has none. Others treat tokens with a
high covariance of log-prob and advantage separately, which reduce the policy's entropy the most (Cui et al.
2025, arXiv 2505.22617).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.kl import LOG_RATIO_LIMIT
from megarl.algorithms.masked import (
    as_rows,
    empty_like,
    leaves_nothing_out,
    map_tokens,
    masked,
    masked_mean,
    of_form,
    row_lengths,
)
from megarl.batch.ragged import Column
from megarl.config.schema import PolicyLossConfig, PolicyLossKind

SELECTED_TOKENS = "selected_tokens"  # the batch key of the tokens that clip_cov and kl_cov select


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """The inputs of a policy loss, all (b, R), with 0 (or False) in masked slots.

    Use `of` to create it, which ensures this.
    """

    log_probs: Tensor  # of the trained policy, with the autograd graph
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor  # bool
    selected: Tensor  # bool: tokens selected by `PolicyLoss.prepare`; all False without it

    @classmethod
    def of(
        cls,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        selected: Tensor | None = None,
    ) -> PolicyInputs:
        """Mask the inputs.

        Args:
            old_log_probs: None: use the current log-probs, so that every ratio is exactly 1 but has a
                gradient.
        """
        # Masked slots are 0, so every ratio there is 1 and no NaN reaches a gradient.
        log_probs = masked(log_probs, mask)
        return cls(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old_log_probs is None else masked(old_log_probs, mask),
            advantages=masked(advantages, mask),
            mask=mask,
            selected=torch.zeros_like(mask) if selected is None else selected & mask,
        )

    @property
    def log_ratio(self) -> Tensor:
        """Difference of the new and the old log-prob, not clamped."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """exp(log_ratio), clamped to stay finite even if a probability collapses; 1 in masked slots."""
        return exp_ratio(self.log_ratio)

    def row_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over each row's valid tokens, (b, 1).

        x must be 0 in masked slots. The mean is 0 for a row without valid tokens.
        """
        return x.sum(dim=1, keepdim=True) / self.mask.sum(dim=1, keepdim=True).clamp(min=1)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class TokenLosses(NamedTuple):
    """The loss of each token, all (b, R). Masked slots are ignored."""

    loss: Tensor
    bounded: Tensor  # bool: the loss's own limit is active; each loss defines it
    # bool: the limit for negative advantages is active, for losses that have one
    dual_clipped: Tensor | None = None


Prepare = Callable[[Mapping[str, Column], Column, PolicyLossConfig, int], dict[str, Column]]


@dataclass(frozen=True)
class PolicyLoss:
    """One kind of policy loss.

    Attributes:
        per_token: Maps the inputs of a micro-batch to the loss of each token. It must not mix rows, so that
            the split into micro-batches does not matter.
        prepare: For kinds that need the whole mini-batch. `prepare(columns, mask, config, seed)` is called
            before the mini-batch is split, with its columns by batch key (it reads `old_log_probs` and
            `advantages`) and its response mask, either all (B, R) tensors or all rows of tokens, and a seed
            for random draws. It returns columns to add to the batch, which ActorLoss reads:
            `selected_tokens`, bool.
    """

    per_token: Callable[[PolicyInputs, PolicyLossConfig], TokenLosses]
    prepare: Prepare | None = None


def ppo_clip(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """PPO: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(new - old).

    Schulman et al. 2017, eq. 7; with separate bounds DAPO, Yu et al. 2025, arXiv 2503.14476.

    With `clip_dual` c > 1, the loss of a token with A < 0 is at most -c A (Ye et al. 2020, eq. 5). `bounded`
    marks tokens whose clipped term is the larger one, so they have no gradient.
    """
    ratio = inputs.ratio
    advantages = inputs.advantages
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    bounded = clipped > plain
    if config.clip_dual is None:
        return TokenLosses(loss, bounded)
    # The ceiling limits the loss of a large ratio with a negative advantage.
    ceiling = -config.clip_dual * advantages
    dual_clipped = (advantages < 0) & (loss > ceiling)

    return TokenLosses(torch.where(dual_clipped, ceiling, loss), bounded, dual_clipped)


def gspo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """GSPO: the PPO surrogate with a ratio per response (Zheng et al. 2025, arXiv 2507.18071, eqs. 5 to 7).

    The ratio is s = exp(mean over the response's tokens of new - old). With the aggregation
    sequence_mean_token_mean, the loss of a row is the paper's.

    The implementation is GSPO-token (eqs. 13 and 14), s_t = sg[s] exp(new_t - sg[new_t]). It has the same
    value and, if the advantages of a row are equal, the same gradient; it is also correct if they differ.
    `bounded` marks tokens of responses whose ratio is clipped, so they have no gradient.
    """
    response = exp_ratio(inputs.row_mean(inputs.log_ratio.detach()))
    # The second factor has the value 1 and passes the gradient to each token's log-prob.
    ratio = response * (inputs.log_probs - inputs.log_probs.detach()).exp()
    plain = -ratio * inputs.advantages
    clipped = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * inputs.advantages

    return TokenLosses(torch.maximum(plain, clipped), clipped > plain)


def gmpo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """GMPO: the geometric mean of the clipped ratios of a response (Zhao et al. 2025, arXiv 2507.20673).

    The loss of each token is -A exp(mean over the response's tokens of the clipped log-ratio). With the
    aggregation sequence_mean_token_mean this is the paper's loss.

    The log-ratio is at most clip_high if A > 0 and at least -clip_low if A < 0 (0.4 for both in the paper). A
    is the response's: the mean of its tokens' advantages. `bounded` marks tokens whose log-ratio is clipped,
    so they add no gradient.
    """
    advantage = inputs.row_mean(inputs.advantages)
    log_ratio = inputs.log_ratio
    # Clip only on the side to which the advantage pushes.
    cut = torch.where(
        advantage > 0, log_ratio.clamp(max=config.clip_high), log_ratio.clamp(min=-config.clip_low)
    )
    loss = -advantage * exp_ratio(inputs.row_mean(cut))

    return TokenLosses(loss.expand_as(log_ratio), cut != log_ratio)


def cispo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """CISPO: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p (MiniMax 2025, arXiv 2506.13585).

    sg is stop-gradient.

    The paper has no lower bound, which corresponds to a clip_low near 1. `bounded` marks tokens whose weight
    is clipped.
    """
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return TokenLosses(-weight * inputs.advantages * inputs.log_probs, weight != ratio)


def sapo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """SAPO: -f(ratio) A with f(x) = 4 / tau sigmoid(tau (x - 1)) (Gao et al. 2025, arXiv 2511.20347).

    tau is temperature_positive if A > 0, else temperature_negative. At a ratio of 1 the gradient equals the
    policy gradient; it decreases smoothly on both sides, faster with a larger tau. No token is `bounded`.
    """
    negative = torch.full_like(inputs.advantages, config.sapo.temperature_negative)
    temperature = negative.masked_fill(inputs.advantages > 0, config.sapo.temperature_positive)
    # The factor 4 / tau makes the slope 1 at a ratio of 1.
    gate = torch.sigmoid(temperature * (inputs.ratio - 1.0)) * 4.0 / temperature

    return TokenLosses(-gate * inputs.advantages, torch.zeros_like(inputs.mask))


def vespo(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """VESPO: -sg[w^k exp(lambda (1 - w))] A log p, with the ratio w of the response (Shen et al. 2026).

    arXiv 2602.10693. w is the product of the ratios of the response's tokens, without normalization by their
    number, and sg is stop-gradient. k and lambda are those of `vespo` for the sign of A.

    The weight is 1 at w = 1 and falls smoothly on both sides of its maximum, k / lambda. No token is
    `bounded`.
    """
    log_ratio = _of_response(inputs)
    is_negative = inputs.advantages < 0
    power = torch.where(is_negative, config.vespo.power_negative, config.vespo.power_positive)
    rate = torch.where(is_negative, config.vespo.rate_negative, config.vespo.rate_positive)
    # One exponential, because w^k alone may be large where the weight is not.
    weight = (power * log_ratio + rate * (1.0 - log_ratio.exp())).exp()

    return TokenLosses(-weight * inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask))


def topr(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """TOPR: -A log p if A >= 0, else -sg[min(w, 1)] A log p (Le Roux et al. 2025, arXiv 2503.14286).

    w is the ratio of the response, the product of those of its tokens, and sg is stop-gradient. A response
    that the policy has already made unlikely is not pushed down further. `bounded` marks tokens whose weight
    is cut to 1.
    """
    ratio = _of_response(inputs).exp()
    is_negative = inputs.advantages < 0
    weight = torch.where(is_negative, ratio.clamp(max=1.0), 1.0)

    return TokenLosses(-weight * inputs.advantages * inputs.log_probs, is_negative & (ratio > 1.0))


def _of_response(inputs: PolicyInputs) -> Tensor:
    """Return the log-ratio of each response, the sum over its tokens, (b, 1), clamped and detached."""
    total = inputs.log_ratio.detach().sum(dim=1, keepdim=True)
    return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def dro(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """DRO: -A log p + dro_beta / 2 (new - old)^2 (Richemond et al. 2024, arXiv 2405.19107).

    The policy's samples replace the paper's offline data, the advantage its reward minus value, and the
    policy that generated the samples its reference. Here it is per token. No token is `bounded`.
    """
    penalty = 0.5 * config.dro_beta * inputs.log_ratio.square()
    return TokenLosses(-inputs.advantages * inputs.log_probs + penalty, torch.zeros_like(inputs.mask))


def dppo_tv(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """DPPO with the total variation |p_new - p_old| as the distance, see `_dppo`.

    The total variation is that of the binary distribution "the sampled token or another".
    """
    return _dppo(inputs, config, (inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()).abs())


def dppo_kl(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """DPPO with KL(old || new) as the distance, see `_dppo`.

    The divergence is that of the binary distribution "the sampled token or another".
    """
    new = inputs.log_probs.detach()
    old = inputs.old_log_probs
    others = log_of_others(old)
    distance = old.exp() * (old - new) + others.exp() * (others - log_of_others(new))

    return _dppo(inputs, config, distance)


def off_policy(
    log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor, limit: float
) -> Tensor:
    """Return the tokens without a loss, (b, R) bool: the off-policy sequence mask of DeepSeek-V3.2.

    arXiv 2512.02556. They have a negative advantage and belong to a response that the policy has made
    unlikely: the mean over its tokens of the log-prob with which it was sampled, minus the policy's, is above
    `limit`. Arguments are (b, R).
    """
    difference = masked(rollout_log_probs - log_probs.detach(), mask)
    mean = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mask & (advantages < 0) & (mean > limit)


def log_of_others(log_probs: Tensor) -> Tensor:
    """Return log(1 - p), finite also for p = 1."""
    rest = -torch.expm1(log_probs)
    return rest.clamp(min=torch.finfo(log_probs.dtype).tiny).log()


def _dppo(inputs: PolicyInputs, config: PolicyLossConfig, distance: Tensor) -> TokenLosses:
    """Return -M ratio A (Qi et al. 2026, arXiv 2602.04879).

    M is 0 for a token whose distance exceeds its limit and that the update would move further: A > 0 and
    p_new > p_old (limit clip_high), or A < 0 and p_new < p_old (limit clip_low). M is 1 otherwise. With
    `clip_dual`, the weight of the gradient is min(ratio, clip_dual). `bounded` marks tokens with M = 0, so
    they have no gradient.
    """
    risen = inputs.log_ratio.detach() > 0
    fallen = inputs.log_ratio.detach() < 0
    too_far_up = (inputs.advantages > 0) & risen & (distance > config.clip_high)
    too_far_down = (inputs.advantages < 0) & fallen & (distance > config.clip_low)
    bounded = too_far_up | too_far_down
    weight = inputs.ratio.detach()
    if config.clip_dual is not None:
        weight = weight.clamp(max=config.clip_dual)
    # The value is the weight; the gradient reaches only the log-prob.
    surrogate = weight * (inputs.log_probs - inputs.log_probs.detach()).exp()

    return TokenLosses(torch.where(bounded, 0.0, -surrogate * inputs.advantages), bounded)


def gpg(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """GPG: -A log p, without a ratio (Chu et al. 2025, arXiv 2504.02546).

    It is correct for one update per batch. No token is `bounded`.
    """
    return TokenLosses(-inputs.advantages * inputs.log_probs, torch.zeros_like(inputs.mask))


def clip_cov(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """Clip-Cov: the PPO surrogate, with loss 0 for the selected tokens.

    `bounded` marks tokens that are clipped as in PPO, or selected.
    """
    losses = ppo_clip(inputs, config)
    loss = torch.where(inputs.selected, 0.0, losses.loss)
    return TokenLosses(loss, losses.bounded | inputs.selected, losses.dual_clipped)


def select_for_clip_cov(
    columns: Mapping[str, Column], mask: Column, config: PolicyLossConfig, seed: int
) -> dict[str, Column]:
    """Select tokens for clip_cov.

    `covariance.share` of the mini-batch's tokens are drawn uniformly from those whose covariance is between
    `covariance.low` and `covariance.high`.

    Returns:
        `selected_tokens`, (B, R) bool.
    """
    low = config.covariance.low
    high = config.covariance.high
    is_candidate = map_tokens(
        lambda x: (x > low) & (x < high), mask, token_covariance(columns, mask), dtype=torch.bool
    )
    candidates = as_rows(is_candidate).values.nonzero().flatten()
    # A separate generator makes the draw independent of the global random state.
    drawn = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))

    return _selected(candidates[drawn[: number_to_select(mask, config.covariance.share)]], mask)


def kl_cov(inputs: PolicyInputs, config: PolicyLossConfig) -> TokenLosses:
    """KL-Cov: -ratio A, plus kl_coefficient |new - old| for the selected tokens.

    The distance is that of the authors' code.

    The ratio is not clipped. `bounded` marks the selected tokens.
    """
    penalty = config.covariance.kl_coefficient * inputs.log_ratio.abs()
    loss = -inputs.ratio * inputs.advantages + torch.where(inputs.selected, penalty, 0.0)
    return TokenLosses(loss, inputs.selected)


def select_for_kl_cov(
    columns: Mapping[str, Column], mask: Column, config: PolicyLossConfig, seed: int
) -> dict[str, Column]:
    """Select tokens for kl_cov.

    The selected tokens are the `covariance.share` of the mini-batch's tokens with the largest covariance.

    Returns:
        `selected_tokens`, (B, R) bool.
    """
    covariance = as_rows(token_covariance(columns, mask)).values
    # Masked tokens must never be among the largest.
    if not leaves_nothing_out(mask):
        covariance = covariance.masked_fill(~as_rows(mask).flat(), -torch.inf)
    return _selected(covariance.topk(number_to_select(mask, config.covariance.share)).indices, mask)


def _selected(tokens: Tensor, mask: Column) -> dict[str, Column]:
    """Build the `selected_tokens` column from token indices into the concatenation of all rows."""
    selected = empty_like(mask, torch.bool)
    selected.values.zero_()[tokens] = True
    return {SELECTED_TOKENS: of_form(selected, mask)}


def token_covariance(columns: Mapping[str, Column], mask: Column) -> Column:
    """Return (log p - mean log p) (A - mean A) of each token, (B, R).

    log p are the `old_log_probs` and A the `advantages`, with means over the valid tokens of the mini-batch.
    Masked slots are 0.

    Its mean is the covariance of log-prob and advantage. A policy gradient step reduces the entropy in
    proportion to it.
    """
    log_probs = columns["old_log_probs"]
    advantages = columns["advantages"]
    mean_log_prob = masked_mean(log_probs, mask)
    mean_advantage = masked_mean(advantages, mask)

    return map_tokens(
        lambda p, advantage: (p - mean_log_prob) * (advantage - mean_advantage), mask, log_probs, advantages
    )


def number_to_select(mask: Column, share: float) -> int:
    """Return the number of tokens to select: at least one if there is any token."""
    num_tokens = int(row_lengths(mask).sum())
    return min(num_tokens, max(1, int(share * num_tokens)))


POLICY_LOSSES: dict[PolicyLossKind, PolicyLoss] = {
    PolicyLossKind.ppo_clip: PolicyLoss(ppo_clip),
    PolicyLossKind.gspo: PolicyLoss(gspo),
    PolicyLossKind.gmpo: PolicyLoss(gmpo),
    PolicyLossKind.cispo: PolicyLoss(cispo),
    PolicyLossKind.sapo: PolicyLoss(sapo),
    PolicyLossKind.vespo: PolicyLoss(vespo),
    PolicyLossKind.topr: PolicyLoss(topr),
    PolicyLossKind.dro: PolicyLoss(dro),
    PolicyLossKind.dppo_tv: PolicyLoss(dppo_tv),
    PolicyLossKind.dppo_kl: PolicyLoss(dppo_kl),
    PolicyLossKind.gpg: PolicyLoss(gpg),
    PolicyLossKind.clip_cov: PolicyLoss(clip_cov, prepare=select_for_clip_cov),
    PolicyLossKind.kl_cov: PolicyLoss(kl_cov, prepare=select_for_kl_cov),
}
