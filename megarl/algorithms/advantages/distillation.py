"""Computes on-policy distillation, from sampled tokens or from the teacher's most likely ones.

With sampled tokens, the advantage of each is the log-ratio of the teacher and the policy (`distillation`).
With the teacher's top k, the policy loss has their divergence as a term (`top_k_kl`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.group_relative import grpo
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator, needed
from megarl.algorithms.masked import map_tokens, masked_mean
from megarl.batch.ragged import Column
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, DistillationKL

_NAME = "distillation"


def distillation(inputs: AdvantageInputs, config: AdvantageConfig) -> Advantages:
    """Per-token reverse KL (Agarwal et al. 2024, arXiv 2306.13649; Gu et al. 2024, arXiv 2306.08543).

    The advantage of a token is coefficient x (log p_teacher - log p_old) + reward_weight x A, where A is the
    advantage of `grpo` for the sample. A token is held responsible for its own divergence only, not for that
    of the tokens that follow. With a reward_weight of 0, rewards are ignored. With `top_k`, the policy loss
    has the teacher's term, and the advantage has the rewards' alone.
    """
    section = config.distillation
    coefficient = section.coefficient
    mask = inputs.response_mask
    advantages = (
        map_tokens(lambda teacher, old: coefficient * (teacher - old), mask, *_log_probs(inputs))
        if section.top_k is None
        else map_tokens(torch.zeros_like, mask, inputs.token_level_rewards)
    )

    # Mix in the rewards, as an advantage of the whole sample.
    if weight := section.reward_weight:
        rewarded = grpo(inputs, config).advantages
        advantages = map_tokens(lambda own, other: own + weight * other, mask, advantages, rewarded)

    return Advantages(advantages, advantages)


def top_k_kl(log_probs: Tensor, teacher: Tensor, direction: DistillationKL) -> Tensor:
    """Return the KL divergence of two distributions over k tokens and all other tokens together, in nats.

    The other tokens count as one, so both distributions sum to 1. The divergence is never negative, and is 0
    only if the policy gives each of the k tokens the teacher's probability. It never exceeds the divergence
    over the whole vocabulary (data-processing inequality), and equals it if k is the size of the vocabulary.
    Without the term of the other tokens, a policy could lower the reverse divergence by moving its mass to
    them.

    An entry of a policy without other tokens is -inf and left out.

    Args:
        log_probs: (..., k + 1), of the policy, with the autograd graph. The last one is of all other tokens.
        teacher: (..., k + 1), of the teacher.
        direction: Which of the two weighs the log-ratios: `reverse` the policy, `forward` the teacher.

    Returns:
        (...).
    """
    is_there = log_probs.isfinite() & teacher.isfinite()
    # Replaced before anything is computed, so that no NaN reaches the gradient.
    policy = torch.where(is_there, log_probs, 0.0)
    teacher = torch.where(is_there, teacher, 0.0)
    terms = (
        policy.exp() * (policy - teacher)
        if direction is DistillationKL.reverse
        else teacher.exp() * (teacher - policy)
    )
    return terms.sum(-1)  # an entry that is left out is log 1 for both, whose ratio is 0


def distillation_metrics(teacher: Column, old: Column, mask: Column) -> dict[str, float]:
    """Return `distillation/reverse_kl/mean`: the mean of log p_old - log p_teacher over tokens, in nats.

    Args:
        teacher: (B, R), log-probs of the teacher.
        old: (B, R), log-probs of the policy that wrote the samples.
        mask: (B, R) bool.
    """
    return {"distillation/reverse_kl/mean": masked_mean(map_tokens(Tensor.sub, mask, old, teacher), mask)}


def _log_probs(inputs: AdvantageInputs) -> tuple[Column, Column]:
    """Return the log-probs of the teacher and of the policy that wrote the samples."""
    teacher = needed(
        inputs.teacher_log_prob, _NAME, "`teacher_log_prob`", "add run.teacher.log_probs(batch) to the batch"
    )
    old = needed(
        inputs.old_log_probs, _NAME, "`old_log_probs`", "add run.actor.log_probs(batch) to the batch"
    )
    return teacher, old


ESTIMATORS: dict[AdvantageEstimator, Estimator] = {AdvantageEstimator.distillation: distillation}
