"""The divergence of a policy and a teacher over the teacher's k most likely tokens, for distillation."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.config.schema import DistillationKL


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
