import math

import pytest
import torch

from megarl.algorithms.kl import (
    KL_CONTROLLERS,
    KL_ESTIMATORS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    kl_per_token,
    sequence_mean_kl,
)
from megarl.config.schema import KLConfig, KLControllerConfig, KLControllerKind, KLEstimator

NAN = float("nan")
INF = float("inf")


def test_estimators_by_hand():
    log_probs = torch.tensor([math.log(0.5)])
    reference = torch.tensor([math.log(0.25)])
    k3 = 0.5 - 1 + math.log(2)
    expected = {
        KLEstimator.k1: math.log(2),
        KLEstimator.abs_k1: math.log(2),
        KLEstimator.k2: math.log(2) ** 2 / 2,
        KLEstimator.k3: k3,
        KLEstimator.k3_unclamped: k3,
        KLEstimator.k1_straight_through: math.log(2),
        KLEstimator.abs_k1_straight_through: math.log(2),
        KLEstimator.k3_straight_through: k3,
    }
    assert set(KL_ESTIMATORS) == set(KLEstimator) == set(expected)
    for kind, value in expected.items():
        assert float(KL_ESTIMATORS[kind](log_probs, reference)) == pytest.approx(value, rel=1e-6)


def test_k1_and_k3_are_unbiased():
    """Their expectation over the policy's own distribution is the exact KL divergence."""
    policy = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = float((policy * (policy / reference).log()).sum())

    for kind in (KLEstimator.k1, KLEstimator.k3, KLEstimator.k3_unclamped):
        assert float((policy * KL_ESTIMATORS[kind](policy.log(), reference.log())).sum()) == pytest.approx(
            exact, rel=1e-12
        )


def test_k3_is_cut_at_ten_and_has_no_gradient_beyond():
    """e^2.5 - 3.5 = 8.68 is below the limit, e^2.6 - 3.6 = 9.86 too, e^2.7 - 3.7 = 11.2 is not."""
    log_probs = torch.tensor([-2.5, -2.6, -2.7, -500.0], requires_grad=True)
    cut = KL_ESTIMATORS[KLEstimator.k3](log_probs, torch.zeros(4))
    cut.sum().backward()
    torch.testing.assert_close(
        cut.detach(), torch.tensor([math.exp(2.5) - 3.5, math.exp(2.6) - 3.6, 10.0, 10.0])
    )
    torch.testing.assert_close(log_probs.grad, torch.tensor([1 - math.exp(2.5), 1 - math.exp(2.6), 0.0, 0.0]))
    plain = KL_ESTIMATORS[KLEstimator.k3_unclamped](log_probs.detach(), torch.zeros(4))
    assert float(plain[2]) == pytest.approx(math.exp(2.7) - 3.7, rel=1e-5)
    assert torch.isfinite(plain).all()


def test_k3_unclamped_is_bounded_only_where_it_would_overflow():
    """The value at log q/p = -21 is e^-21 - 1 + 21, with the gradient 1 - e^-21: the reference still pulls
    back a token that it considers impossible."""
    log_ratio = [-21.0, -29.0, -80.0, 21.0, 500.0]
    log_probs = torch.zeros(5, requires_grad=True)
    kl = KL_ESTIMATORS[KLEstimator.k3_unclamped](log_probs, torch.tensor(log_ratio))
    kl.sum().backward()
    torch.testing.assert_close(kl.detach()[:3], torch.tensor([20.0, 28.0, 79.0]))
    torch.testing.assert_close(log_probs.grad[:3], torch.ones(3))
    torch.testing.assert_close(kl.detach()[3:], torch.full((2,), math.exp(20) - 21))
    assert log_probs.grad[3:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", list(KLEstimator))
def test_masked_nan_reaches_neither_value_nor_gradient(kind):
    mask = torch.tensor([[True, False, False]])
    log_probs = torch.tensor([[-1.0, NAN, -INF]], requires_grad=True)
    kl = kl_per_token(log_probs, torch.tensor([[-2.0, INF, NAN]]), mask, kind)
    kl.sum().backward()
    assert torch.isfinite(kl).all()
    assert log_probs.grad[0, 0] != 0
    assert log_probs.grad[0, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kind", [kind for kind in KLEstimator if "straight_through" in kind.name])
def test_straight_through_has_the_gradient_of_the_divergence(kind):
    """The expectation of the gradient over the policy's own distribution is d KL / d logits; that of k1 is
    0."""
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    gradients = {}

    for name in (kind, KLEstimator.k1, "exact"):
        logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
        log_probs = logits.log_softmax(0)
        policy = log_probs.exp()
        if name == "exact":
            (policy * (log_probs - reference)).sum().backward()
        else:
            (policy.detach() * KL_ESTIMATORS[name](log_probs, reference)).sum().backward()
        gradients[name] = logits.grad

    torch.testing.assert_close(gradients[kind], gradients["exact"])
    torch.testing.assert_close(gradients[KLEstimator.k1], torch.zeros(3, dtype=torch.float64))
    assert gradients["exact"].abs().max() > 0.05


def test_gradient_of_abs_k1_has_the_sign_of_the_log_ratio():
    log_probs = torch.tensor([-1.0, -3.0], requires_grad=True)
    KL_ESTIMATORS[KLEstimator.abs_k1](log_probs, torch.tensor([-2.0, -2.0])).sum().backward()
    assert log_probs.grad.tolist() == [1.0, -1.0]


@pytest.mark.parametrize("kind", [kind for kind in KLEstimator if "straight_through" not in kind.name])
def test_gradients_are_right(kind):
    log_probs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: KL_ESTIMATORS[kind](x, torch.tensor([-2.0, -2.5], dtype=torch.float64)), (log_probs,)
    )


def test_penalty_by_hand():
    scores = torch.tensor([[0.0, 1.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    rewards, mean_kl = apply_kl_penalty(
        scores,
        torch.tensor([[-1.0, -2.0, NAN]]),
        torch.tensor([[-3.0, -1.0, NAN]]),
        mask,
        0.1,
        KLEstimator.k1,
    )
    torch.testing.assert_close(rewards, torch.tensor([[-0.2, 1.1, 0.0]]))
    assert mean_kl == 0.5


def test_sequence_mean_kl_by_hand():
    old = torch.tensor([[1.0, 3.0], [4.0, NAN], [NAN, NAN]]) - 7
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]]).bool()
    # rows: 2, 4, and one without tokens
    assert sequence_mean_kl(old, torch.full((3, 2), -7.0), mask, KLEstimator.k1) == 3.0


def test_fixed_controller_stays():
    controller = FixedKLController(0.25)
    controller.update(100.0, 64)
    assert controller.coefficient == 0.25


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.11, 0.5 * (1 + 0.1 * 256 / 1000)),  # error 0.1
        (9.0, 0.5 * (1 + 0.2 * 256 / 1000)),  # clipped above
        (0.0, 0.5 * (1 - 0.2 * 256 / 1000)),  # clipped below
    ],
)
def test_adaptive_controller_by_hand(kl, expected):
    controller = AdaptiveKLController(0.5, target=0.1, horizon=1000)
    controller.update(kl, 256)
    assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_controller_state_survives_a_restart():
    config = KLConfig(
        coefficient=0.5,
        controller=KLControllerConfig(kind=KLControllerKind.adaptive, target=0.1, horizon=1000),
    )
    first, second = (KL_CONTROLLERS[config.controller.kind](config) for _ in range(2))
    first.update(1.0, 100)
    second.load_state_dict(first.state_dict())
    assert second.coefficient == first.coefficient != 0.5
    assert set(KL_CONTROLLERS) == set(KLControllerKind)


def test_adaptive_controller_refuses_a_zero_target():
    with pytest.raises(ValueError, match="target=0.*positive"):
        AdaptiveKLController(0.5, target=0, horizon=10)
