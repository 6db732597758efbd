"""Advantages of on-policy distillation: each token's is the log-ratio of a teacher and the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.group_relative import grpo
from megarl.algorithms.advantages.inputs import AdvantageInputs, Advantages, Estimator, needed
from megarl.algorithms.masked import map_tokens, masked_mean
from megarl.batch.ragged import Column
from megarl.config.schema import AdvantageConfig, AdvantageEstimator

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
