"""The divergence over a teacher's most likely tokens, by hand and against the whole vocabulary in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages.distillation import top_k_kl
from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.batch.metrics import values_of
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    DistillationConfig,
    DistillationKL,
    KLConfig,
    KLWhere,
)

POLICY = [0.5, 0.25, 0.25]  # two tokens and all others
TEACHER = [0.25, 0.25, 0.5]
BY_HAND = {
    DistillationKL.reverse: 0.5 * math.log(2) + 0.25 * math.log(0.5),
    DistillationKL.forward: 0.25 * math.log(0.5) + 0.5 * math.log(2),
}


def logs(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def buckets(log_softmax: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probs of the ids and of all other tokens together."""
    others = log_softmax.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True)
    return torch.cat([log_softmax.gather(-1, ids), others], dim=-1)


@pytest.mark.parametrize("direction", DistillationKL)
def test_by_hand(direction: DistillationKL) -> None:
    found = top_k_kl(logs(POLICY), logs(TEACHER), direction)
    assert float(found) == pytest.approx(BY_HAND[direction], abs=1e-12)
    assert float(top_k_kl(logs(TEACHER), logs(TEACHER), direction)) == 0


@pytest.mark.parametrize("direction", DistillationKL)
def test_a_lower_bound_that_is_the_whole_divergence_with_all_tokens(direction: DistillationKL) -> None:
    generator = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, 16, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    one, other = (policy, teacher) if direction is DistillationKL.reverse else (teacher, policy)
    whole = (one.exp() * (one - other)).sum(-1)
    found = [
        top_k_kl(buckets(policy, ids), buckets(teacher, ids), direction)
        for ids in (teacher.topk(k).indices for k in (1, 5, 25, 50))
    ]
    torch.testing.assert_close(found[-1], whole)
    for fewer, more in zip(found, found[1:], strict=False):
        assert bool((fewer >= 0).all())
        assert bool((fewer <= more + 1e-12).all())


@pytest.mark.parametrize("direction", DistillationKL)
def test_all_tokens_leave_no_others(direction: DistillationKL) -> None:
    """A teacher with further tokens, which the policy cannot write, adds nothing and no NaN to the gradient."""
    policy = torch.tensor([math.log(0.5), math.log(0.5), -math.inf], requires_grad=True)
    found = top_k_kl(policy, torch.tensor([math.log(0.5), math.log(0.25), math.log(0.25)]), direction)
    found.backward()
    weight = 0.5 if direction is DistillationKL.reverse else 0.25
    assert float(found.detach()) == pytest.approx(
        weight * math.log(2) if direction is DistillationKL.reverse else -weight * math.log(2)
    )
    assert policy.grad is not None
    assert bool(policy.grad.isfinite().all())
    assert policy.grad[-1] == 0


def test_the_loss_adds_the_divergence_of_valid_tokens() -> None:
    """The second token was written by a tool, the second row ends after one token: two tokens count."""
    section = DistillationConfig(coefficient=3.0, top_k=2, reward_weight=1.0)
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.distillation, distillation=section),
        kl=KLConfig(where=KLWhere.none),
    )
    mask = torch.tensor([[True, False], [True, False]])
    top = torch.stack([logs(POLICY), torch.full((3,), math.nan)]).expand(2, 2, 3).clone().requires_grad_()
    teacher = torch.stack([logs(TEACHER), torch.zeros(3)]).expand(2, 2, 3)
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    loss, metrics = ActorLoss(algorithm=algorithm, counts=MiniBatchCounts.of(mask))(
        {"log_probs": zeros, "top_log_probs": top},
        {"response_mask": mask, "advantages": zeros + 2.0, "teacher_top_log_probs": teacher},
    )
    divergence = BY_HAND[DistillationKL.reverse]
    assert float(loss.detach()) == pytest.approx(-2.0 + 3.0 * divergence)
    assert values_of(metrics)["actor/top_k_kl"] == pytest.approx(divergence)
    assert values_of(metrics)["actor/top_k_mass"] == pytest.approx(0.5)
    loss.backward()
    assert top.grad is not None
    # Of q (log q - log p): log q - log p + 1 times q, halved by the two tokens.
    expected = 1.5 * torch.tensor([0.5 * (math.log(2) + 1), 0.25, 0.25 * (1 - math.log(2))])
    torch.testing.assert_close(top.grad[:, 0], expected.double().expand(2, 3))
    assert not top.grad[:, 1].any()
