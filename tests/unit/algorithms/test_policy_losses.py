"""Policy losses: worked examples, comparison with a slow reference in value and gradient, and splits into
micro-batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.policy_losses import (
    POLICY_LOSSES,
    SELECTED_TOKENS,
    PolicyInputs,
    off_policy,
    token_covariance,
)
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import CovarianceConfig, PolicyLossConfig, PolicyLossKind, SAPOConfig
from tests.unit.algorithms.reference import policy_row
from tests.unit.algorithms.strategies import masks, normal, poison

NAN = float("nan")
INF = float("inf")
KINDS = list(PolicyLossKind)


def config_of(kind, **changes):
    """Return a config with bounds that some standard normal log-ratios reach and others do not."""
    bounds = (
        {"clip_low": 0.05, "clip_high": 0.03}
        if kind.name.startswith("dppo")
        else {"clip_low": 0.3, "clip_high": 0.4}
    )
    return PolicyLossConfig(
        kind=kind,
        **(bounds | {"covariance": CovarianceConfig(share=0.3, low=-1.0, kl_coefficient=0.5)} | changes),
    )


def losses_of(config, ratios, advantages, old=None, selected=None):
    """Return the TokenLosses of rows without masked tokens. `old` are probabilities, by default 0.1."""
    ratios = torch.tensor(ratios)
    old = torch.full_like(ratios, 0.1).log() if old is None else torch.tensor(old).log()
    advantages = torch.tensor(advantages)
    mask = torch.ones(ratios.shape, dtype=torch.bool)
    selected = None if selected is None else torch.tensor(selected)
    inputs = PolicyInputs.of(old + ratios.log(), old, advantages, mask, selected)

    return POLICY_LOSSES[config.kind].per_token(inputs, config)


def test_registry_covers_every_kind():
    assert set(POLICY_LOSSES) == set(PolicyLossKind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_declares_its_dual_clip_and_its_ratio(kind):
    """A loss declares `clip_dual` if that changes it, and a ratio if the old log-probs change it, because
    more than one update per batch is refused otherwise."""
    ratios = [[1.0, 1.5, 0.5, 10.0]]
    advantages = [[2.0, 2.0, -2.0, -2.0]]
    plain, dual = (
        losses_of(config_of(kind, clip_dual=clip_dual), ratios, advantages).loss for clip_dual in (None, 3.0)
    )
    assert kind.needs.dual_clip == (not torch.equal(plain, dual))
    near, far = (
        losses_of(config_of(kind), [[new / old]], [[-1.0]], [[old]]).loss
        for new, old in ((0.1, 0.1), (0.1, 0.2))
    )
    assert kind.needs.ratio == (not torch.equal(near, far))


def test_ppo_clip_by_hand():
    ratios = [[1.0, 1.5, 0.5, 1.5, 0.5, 10.0]]
    advantages = [[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]]
    result = losses_of(PolicyLossConfig(clip_low=0.2, clip_high=0.3), ratios, advantages)
    torch.testing.assert_close(result.loss, torch.tensor([[-2.0, -2.6, -1.0, 3.0, 1.6, 20.0]]))
    assert result.bounded.tolist() == [[False, True, False, False, True, False]]
    assert result.dual_clipped is None
    dual = losses_of(PolicyLossConfig(clip_low=0.2, clip_high=0.3, clip_dual=3.0), ratios, advantages)
    torch.testing.assert_close(dual.loss, torch.tensor([[-2.0, -2.6, -1.0, 3.0, 1.6, 6.0]]))
    assert dual.dual_clipped.tolist() == [[False] * 5 + [True]]


def test_gspo_by_hand():
    # row 1: sqrt(2 x 0.5) = 1; row 2: sqrt(4 x 1) = 2, clipped to 1.5 for A > 0 and not for A < 0
    config = PolicyLossConfig(kind=PolicyLossKind.gspo, clip_low=0.5, clip_high=0.5)
    result = losses_of(config, [[2.0, 0.5], [4.0, 1.0], [4.0, 1.0]], [[1.0, 1.0], [2.0, 2.0], [-2.0, -2.0]])
    torch.testing.assert_close(result.loss, torch.tensor([[-1.0, -1.0], [-3.0, -3.0], [4.0, 4.0]]))
    assert result.bounded.tolist() == [[False, False], [True, True], [False, False]]


def test_gmpo_by_hand():
    # A = 3: log-ratios log 2 and log 8, cut at log 4: sqrt(2 x 4) = sqrt(8). A = -1: ratios 2 and 1/8, the
    # second cut at 1/2: 1
    config = PolicyLossConfig(kind=PolicyLossKind.gmpo, clip_low=math.log(2), clip_high=math.log(4))
    result = losses_of(
        config, [[2.0, 8.0], [2.0, 0.125]], [[3.0, 3.0], [-1.0, -1.0]], old=[[0.1, 0.01], [0.1, 0.1]]
    )
    torch.testing.assert_close(result.loss, torch.tensor([[-3 * 8**0.5, -3 * 8**0.5], [1.0, 1.0]]))
    assert result.bounded.tolist() == [[False, True], [False, True]]


def test_cispo_by_hand():
    # log p = log(0.1 x ratio); the weights are 1.2, 1, 0.8
    config = PolicyLossConfig(kind=PolicyLossKind.cispo, clip_low=0.2, clip_high=0.2)
    result = losses_of(config, [[2.0, 1.0, 0.5]], [[1.0, -1.0, 2.0]])
    expected = [-1.2 * math.log(0.2), math.log(0.1), -1.6 * math.log(0.05)]
    torch.testing.assert_close(result.loss, torch.tensor([expected]))
    assert result.bounded.tolist() == [[True, False, True]]


def test_sapo_by_hand():
    # The gate at a ratio of 1 is 4/tau x 1/2; at 1 + log(3)/tau the sigmoid is 3/4
    sapo = SAPOConfig(temperature_positive=1.0, temperature_negative=2.0)
    config = PolicyLossConfig(kind=PolicyLossKind.sapo, sapo=sapo)
    result = losses_of(config, [[1.0, 1.0, 1 + math.log(3), 1 + math.log(3) / 2]], [[1.0, -1.0, 1.0, -1.0]])
    torch.testing.assert_close(result.loss, torch.tensor([[-2.0, 1.0, -3.0, 1.5]]))


def test_vespo_by_hand():
    # the response's ratio is 2 x 1 = 2: 2^2 e^(3 (1 - 2)) for A > 0, 2^3 e^(2 (1 - 2)) for A < 0
    config = PolicyLossConfig(kind=PolicyLossKind.vespo)
    result = losses_of(config, [[2.0, 1.0], [2.0, 1.0]], [[1.0, 1.0], [-1.0, -1.0]])
    good, bad = 4 * math.exp(-3), 8 * math.exp(-2)
    logs = [math.log(0.2), math.log(0.1)]
    torch.testing.assert_close(
        result.loss, torch.tensor([[-good * log for log in logs], [bad * log for log in logs]])
    )


def test_topr_by_hand():
    # ratios of the responses: 4 for A > 0, which counts in full; 1/4 and 4 for A < 0, the latter cut to 1
    config = PolicyLossConfig(kind=PolicyLossKind.topr)
    ratios = [[2.0, 2.0], [0.5, 0.5], [2.0, 2.0]]
    result = losses_of(config, ratios, [[2.0, 2.0], [-1.0, -1.0], [-1.0, -1.0]])
    high, low = math.log(0.2), math.log(0.05)
    torch.testing.assert_close(result.loss, torch.tensor([[-2 * high] * 2, [0.25 * low] * 2, [high] * 2]))
    assert result.bounded.tolist() == [[False] * 2, [False] * 2, [True] * 2]


def test_dro_by_hand():
    config = PolicyLossConfig(kind=PolicyLossKind.dro, dro_beta=0.5)
    result = losses_of(config, [[2.0, 1.0]], [[3.0, -1.0]])
    expected = [-3 * math.log(0.2) + 0.25 * math.log(2) ** 2, math.log(0.1)]
    torch.testing.assert_close(result.loss, torch.tensor([expected]))


def test_a_response_that_became_unlikely_is_off_policy_by_hand():
    """Mean falls of (0.4 + 0.2) / 2 and 0.1 over the valid tokens; the last row has grown likelier."""
    rollout = torch.tensor([[-1.0, -1.0, NAN], [-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    new = torch.tensor([[-1.4, -1.2, INF], [-1.3, -0.9, -1.1], [-0.1, -0.1, -0.1]])
    mask = torch.tensor([[True, True, False], [True, True, True], [True, True, True]])
    for advantage, limit, expected in (
        (-1.0, 0.2, [True, False, False]),
        (-1.0, 0.05, [True, True, False]),
        (-1.0, 0.31, [False, False, False]),
        (1.0, 0.05, [False, False, False]),
    ):
        excluded = off_policy(new, rollout, torch.full((3, 3), advantage), mask, limit)
        assert torch.equal(excluded, mask & torch.tensor(expected)[:, None])


def test_luspo_is_gspo_summed_over_the_tokens():
    """LUSPO's loss is GSPO's times the length: the sum of the same token losses, in value and gradient."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    new, old = (normal(mask, seed) for seed in range(2))
    leaf = new.clone().requires_grad_()
    advantages = torch.tensor([[1.5], [-0.5]], dtype=torch.float64).expand(2, 3)
    config = config_of(PolicyLossKind.gspo)
    losses = POLICY_LOSSES[config.kind].per_token(PolicyInputs.of(leaf, old, advantages, mask), config).loss
    (losses * mask).sum().backward()

    again = new.clone().requires_grad_()
    lengths = mask.sum(dim=1)
    ratio = ((again - old) * mask).sum(dim=1).div(lengths).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    paper = lengths * -torch.minimum(ratio * advantages[:, 0], clipped * advantages[:, 0])
    paper.sum().backward()
    torch.testing.assert_close((losses * mask).sum(dim=1), paper)
    torch.testing.assert_close(leaf.grad, again.grad)


def test_gpg_by_hand():
    result = losses_of(PolicyLossConfig(kind=PolicyLossKind.gpg), [[1.0, 5.0]], [[2.0, -1.0]])
    torch.testing.assert_close(result.loss, torch.tensor([[-2 * math.log(0.1), math.log(0.5)]]))


def test_selected_tokens_by_hand():
    ratios = [[1.1, 1.1, 2.0]]
    advantages = [[1.0, 1.0, 1.0]]
    selected = [[True, False, False]]
    clip = losses_of(PolicyLossConfig(kind=PolicyLossKind.clip_cov), ratios, advantages, selected=selected)
    torch.testing.assert_close(clip.loss, torch.tensor([[0.0, -1.1, -1.2]]))
    assert clip.bounded.tolist() == [[True, False, True]]
    covariance = CovarianceConfig(kl_coefficient=0.5)
    kl = losses_of(
        PolicyLossConfig(kind=PolicyLossKind.kl_cov, covariance=covariance),
        ratios,
        advantages,
        selected=selected,
    )
    torch.testing.assert_close(kl.loss, torch.tensor([[-1.1 + 0.5 * math.log(1.1), -1.1, -2.0]]))
    assert kl.bounded.tolist() == [[True, False, False]]


def test_dppo_by_hand():
    # p: 0.5 -> 0.6 (TV 0.1), 0.5 -> 0.9 (0.4), 0.001 -> 0.01 (a ratio of 10, TV 0.009); each with A > 0, then
    # with A < 0
    old = [[0.5, 0.5, 0.001] * 2]
    ratios = [[1.2, 1.8, 10.0] * 2]
    advantages = [[1.0] * 3 + [-1.0] * 3]
    config = PolicyLossConfig(kind=PolicyLossKind.dppo_tv, clip_low=0.2, clip_high=0.2)
    result = losses_of(config, ratios, advantages, old)

    # A < 0 takes a token that rose back
    assert result.bounded.tolist() == [[False, True, False, False, False, False]]
    torch.testing.assert_close(result.loss, torch.tensor([[-1.2, 0.0, -10.0, 1.2, 1.8, 10.0]]))

    # KL(old || new) of 0.5 -> 0.9: 0.5 log(0.5 / 0.9) + 0.5 log(0.5 / 0.1) = 0.5108
    for limit, bounded in ((0.52, False), (0.50, True)):
        kl = PolicyLossConfig(kind=PolicyLossKind.dppo_kl, clip_low=0.2, clip_high=limit, clip_dual=3.0)
        result = losses_of(kl, ratios, advantages, old)
        assert result.bounded[0, 1].item() is bounded
        assert result.loss[0, 2].item() == pytest.approx(-3.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clip_dual", [None, 1.5])
@settings(max_examples=15, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000))
def test_value_and_gradient_match_the_reference(kind, clip_dual, mask, seed):
    """The gradient equals that of the reference by finite differences, with stop-gradient parts fixed."""
    config = config_of(kind, clip_dual=clip_dual)
    old = -0.1 - normal(mask, seed).abs()
    new = (old + 0.5 * normal(mask, seed + 1)).clamp(max=-0.05)
    advantages = normal(mask, seed + 2)
    selected = normal(mask, seed + 3) > 0.5
    leaf = poison(new, mask).requires_grad_()
    inputs = PolicyInputs.of(leaf, poison(old, mask, INF), poison(advantages, mask, -INF), mask, selected)
    losses = POLICY_LOSSES[kind].per_token(inputs, config).loss
    weights = normal(mask, seed + 4)
    (losses * weights)[mask].sum().backward()
    assert (leaf.grad[~mask] == 0).all()

    for row in range(len(mask)):
        frozen = new[row].tolist()
        fixed = [x[row].tolist() for x in (old, advantages, mask, selected)]
        expected = policy_row(kind.name, frozen, frozen, *fixed, config)
        assert {t: losses[row, t].item() for t in expected} == pytest.approx(expected, rel=1e-9, abs=1e-12)
        for t in expected:
            up, down = (frozen[:t] + [frozen[t] + step] + frozen[t + 1 :] for step in (1e-6, -1e-6))
            difference = [policy_row(kind.name, moved, frozen, *fixed, config) for moved in (up, down)]
            slope = (
                sum(weights[row, u].item() * (difference[0][u] - difference[1][u]) for u in expected) / 2e-6
            )
            assert leaf.grad[row, t].item() == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind.name not in ("gspo", "cispo", "vespo", "topr", "dppo_tv", "dppo_kl")],
)
def test_gradcheck(kind):
    """This covers losses without stop-gradient parts; the others are compared with the reference."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    new, old, advantages = (normal(mask, k) for k in range(3))
    selected = torch.tensor([[True, False, False], [False, True, False]])

    def loss(x):
        return (
            POLICY_LOSSES[kind]
            .per_token(PolicyInputs.of(x, old, advantages, mask, selected), config_of(kind))
            .loss
            * mask
        )

    assert torch.autograd.gradcheck(loss, (new.requires_grad_(),))


@pytest.mark.parametrize("kind", KINDS)
def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_that_of_the_policy_gradient(kind):
    """This holds for every kind, because no limit is active at a ratio of 1.

    Losses of a whole response spread the gradient over its tokens.
    """
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    leaf = poison(normal(mask, 0), mask).requires_grad_()
    advantages = torch.tensor([[2.0], [-1.0], [5.0]]).expand(3, 3)
    inputs = PolicyInputs.of(leaf, None, advantages, mask)
    assert torch.equal(inputs.ratio, torch.ones(3, 3, dtype=torch.float64))
    losses = POLICY_LOSSES[kind].per_token(inputs, config_of(kind))
    losses.loss[mask].sum().backward()
    torch.testing.assert_close(leaf.grad, torch.where(mask, -advantages, 0.0).double())
    assert not losses.bounded.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_collapsed_token_stays_finite(kind):
    leaf = torch.tensor([[0.0, -500.0]], requires_grad=True)
    old = torch.tensor([[-500.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)

    for sign in (1.0, -1.0):
        inputs = PolicyInputs.of(leaf, old, torch.full((1, 2), sign), mask)
        loss = POLICY_LOSSES[kind].per_token(inputs, config_of(kind)).loss
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


def test_covariance_by_hand():
    # log p: -1, -3, mean -2; A: 2, 0, mean 1. (1)(1) and (-1)(-1)
    mask = torch.tensor([[True, True, False]])
    tensors = {
        "old_log_probs": torch.tensor([[-1.0, -3.0, NAN]]),
        "advantages": torch.tensor([[2.0, 0.0, INF]]),
    }
    assert token_covariance(tensors, mask).tolist() == [[1.0, 1.0, 0.0]]


def selection(kind, tensors, mask, seed=0, **covariance):
    config = PolicyLossConfig(kind=kind, covariance=CovarianceConfig(**covariance))
    prepared = POLICY_LOSSES[kind].prepare(tensors, mask, config, seed)
    assert set(prepared) == {SELECTED_TOKENS}
    return prepared[SELECTED_TOKENS]


@settings(max_examples=30, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000), share=st.sampled_from([0.001, 0.3, 1.0]))
def test_kl_cov_selects_the_largest_covariances(mask, seed, share):
    clean = {"old_log_probs": normal(mask, seed), "advantages": normal(mask, seed + 1)}
    selected = selection(
        PolicyLossKind.kl_cov, {key: poison(x, mask) for key, x in clean.items()}, mask, share=share
    )
    num_tokens = int(mask.sum())
    assert not (selected & ~mask).any()
    assert int(selected.sum()) == min(num_tokens, max(1, int(share * num_tokens)))
    covariance = token_covariance(clean, mask)
    if selected.any() and (mask & ~selected).any():
        assert covariance[selected].min() >= covariance[mask & ~selected].max()


@settings(max_examples=30, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000), share=st.sampled_from([0.001, 0.3, 1.0]))
def test_clip_cov_draws_between_the_bounds(mask, seed, share):
    clean = {"old_log_probs": normal(mask, seed), "advantages": normal(mask, seed + 1)}
    poisoned = {key: poison(x, mask) for key, x in clean.items()}
    bounds = {"share": share, "low": -0.2, "high": 0.5}
    selected = selection(PolicyLossKind.clip_cov, poisoned, mask, seed, **bounds)
    covariance = token_covariance(clean, mask)
    num_tokens = int(mask.sum())
    candidates = mask & (covariance > -0.2) & (covariance < 0.5)
    assert not (selected & ~candidates).any()
    assert int(selected.sum()) == min(int(candidates.sum()), max(1, int(share * num_tokens)))
    assert torch.equal(selected, selection(PolicyLossKind.clip_cov, poisoned, mask, seed, **bounds))


@pytest.mark.parametrize("kind", [PolicyLossKind.clip_cov, PolicyLossKind.kl_cov])
def test_the_same_tokens_are_selected_of_rows_without_padding(kind):
    lengths = torch.tensor([5, 2, 4])
    mask = torch.arange(6) < lengths[:, None]
    tensors = {"old_log_probs": normal(mask, 0), "advantages": normal(mask, 1)}
    rows = {key: RaggedTensor.from_padded(poison(x, mask), lengths) for key, x in tensors.items()}
    bounds = {"share": 0.3, "low": -0.5, "high": 0.8}
    selected = selection(kind, rows, RaggedTensor.from_padded(mask, lengths), seed=4, **bounds)
    assert int(selected.values.sum()) == 3
    assert torch.equal(selected.padded(6), selection(kind, tensors, mask, seed=4, **bounds))


def test_clip_cov_draws_others_with_another_seed():
    mask = torch.ones(8, 50, dtype=torch.bool)
    tensors = {"old_log_probs": normal(mask, 0), "advantages": normal(mask, 1)}
    draws = [
        selection(PolicyLossKind.clip_cov, tensors, mask, seed, share=0.05, low=-1.0) for seed in range(2)
    ]
    assert not torch.equal(*draws)
