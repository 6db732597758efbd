"""The policy losses and aggregations there are, and what each loss needs; their maths is in `megarl/algorithms/policy_losses`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megarl.config.kinds.kind import Kind


class Aggregation(str, Enum):
    token_mean = "token_mean"  # every token weighs the same
    sequence_mean_token_sum = "sequence_mean_token_sum"  # the sum over a response, the mean over responses
    sequence_mean_token_mean = "sequence_mean_token_mean"  # the mean over a response, the mean over responses
    sequence_mean_token_sum_norm = "sequence_mean_token_sum_norm"  # the sum over a response by `norm_tokens`, the mean over responses


@dataclass(frozen=True, kw_only=True)
class PolicyLossNeeds:
    """What a policy loss needs of the settings around it."""

    aggregation: Aggregation | None  # the only one under which it is the loss of its paper; None: any
    ratio: bool = True  # it weighs by new / old probability; without, it is right for the very policy that sampled: one update per batch
    dual_clip: bool = False  # it reads `clip_dual`
    whole_mini_batch: bool = False  # `old_log_probs` of a whole mini-batch, before it is cut: they are computed before the update


_OF_RESPONSES = Aggregation.sequence_mean_token_mean


class PolicyLossKind(Kind):
    needs: PolicyLossNeeds

    ppo_clip = "ppo_clip", PolicyLossNeeds(aggregation=None, dual_clip=True)  # clipped ratios of tokens
    gspo = "gspo", PolicyLossNeeds(aggregation=_OF_RESPONSES)  # one clipped ratio for a response
    gmpo = "gmpo", PolicyLossNeeds(aggregation=_OF_RESPONSES)  # the geometric mean of clipped ratios
    cispo = "cispo", PolicyLossNeeds(aggregation=None)  # the weight is clipped, not the token
    sapo = "sapo", PolicyLossNeeds(aggregation=_OF_RESPONSES)  # a soft limit instead of a clip
    gpg = "gpg", PolicyLossNeeds(aggregation=None, ratio=False)  # the log-prob, no ratio
    # ppo_clip without some tokens of high covariance
    clip_cov = "clip_cov", PolicyLossNeeds(aggregation=None, dual_clip=True, whole_mini_batch=True)
    kl_cov = "kl_cov", PolicyLossNeeds(aggregation=None, whole_mini_batch=True)  # a KL penalty on the tokens of highest covariance
    dppo_tv = "dppo_tv", PolicyLossNeeds(aggregation=None, dual_clip=True)  # no update beyond a total variation
    dppo_kl = "dppo_kl", PolicyLossNeeds(aggregation=None, dual_clip=True)  # no update beyond a KL divergence
