import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from megarl.algorithms.advantages.distillation import distillation_metrics
from megarl.algorithms.advantages.token_level import gae, rewards_to_go
from megarl.algorithms.groups import Groups
from megarl.batch import ragged
from megarl.config.schema import AdvantageConfig, AdvantageEstimator, DistillationConfig
from tests.unit.algorithms import reference_advantages
from tests.unit.algorithms.reference import gae_row
from tests.unit.algorithms.strategies import masks, normal, poison

NAN = float("nan")
INF = float("inf")
KINDS = list(AdvantageEstimator)
COMPARING = [kind for kind in KINDS if kind.needs.compares_samples]
INPUTS_OF = {
    "critic": ("values",),
    "greedy_baseline": ("baseline_scores",),
    "score_parts": ("score_parts",),
    "old_log_probs": ("old_log_probs",),
    "sum_pi_squared": ("sum_pi_squared",),
    "teacher": ("teacher_log_prob",),
}  # the inputs of each need, except those of the samples
FRACTIONS = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def test_gae_by_hand():
    # gamma = 0.5, lam = 0.5. delta = [0 + .5*2 - 1, 0 + .5*4 - 2, 3 - 4] = [0, 0, -1]; A = [1/16 * -1, 1/4 *
    # -1, -1]
    rewards = torch.tensor([[0.0, 0.0, 3.0]])
    values = torch.tensor([[1.0, 2.0, 4.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 0.5, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-1 / 16, -1 / 4, -1.0]]))
    torch.testing.assert_close(returns, torch.tensor([[15 / 16, 7 / 4, 3.0]]))


def test_gae_skips_a_hole():
    """The gap is tool output between two turns; the result equals that of the row without it."""
    whole = gae(
        torch.tensor([[0.0, 1.0, 2.0]]),
        torch.tensor([[0.3, 0.2, 0.1]]),
        torch.ones(1, 3, dtype=torch.bool),
        0.9,
        0.8,
    )
    mask = torch.tensor([[True, False, False, True, True, False]])
    rewards = torch.tensor([[0.0, NAN, 7.0, 1.0, 2.0, INF]])
    values = torch.tensor([[0.3, 9.0, NAN, 0.2, 0.1, NAN]])
    holed = gae(rewards, values, mask, 0.9, 0.8)

    for a, b in zip(holed, whole, strict=True):
        torch.testing.assert_close(a[mask], b[0])
        assert torch.equal(a[~mask], torch.zeros(3))


@settings(max_examples=60, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000), gamma=FRACTIONS, lam=FRACTIONS)
def test_gae_is_the_backward_recursion(mask, seed, gamma, lam):
    rewards = normal(mask, seed)
    values = normal(mask, seed + 1)
    advantages, returns = gae(poison(rewards, mask), poison(values, mask, INF), mask, gamma, lam)

    for row in range(len(mask)):
        expected = gae_row(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam)
        np.testing.assert_allclose(
            [advantages[row].tolist(), returns[row].tolist()], expected, rtol=1e-12, atol=1e-12
        )


def test_gae_stays_accurate_over_long_rows_in_float32():
    mask = torch.ones(2, 3000, dtype=torch.bool)
    rewards = normal(mask, 0)
    values = normal(mask, 1)
    exact, _ = gae_row(rewards[1].tolist(), values[1].tolist(), mask[1].tolist(), 1.0, 1.0)
    advantages, _ = gae(rewards.float(), values.float(), mask, 1.0, 1.0)
    assert advantages.dtype == torch.float32
    np.testing.assert_allclose(advantages[1].numpy(), exact, atol=1e-4)  # sums of 3000 numbers of magnitude 1


def test_returns_without_discount_are_rewards_to_go():
    mask = torch.ones(1, 4, dtype=torch.bool)
    _, returns = gae(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), normal(mask, 3, torch.float32), mask, 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[10.0, 9.0, 7.0, 4.0]]))


def test_a_long_row_is_summed_in_blocks():
    """The lengths exceed a block of blocks and are a multiple of neither, with and without a discount."""
    mask = torch.ones(2, 1100, dtype=torch.bool)
    rewards = normal(mask, 0)

    for gamma in (1.0, 0.97):
        expected = gae_row(rewards[0].tolist(), [0.0] * 1100, mask[0].tolist(), gamma, 1.0)[0]
        np.testing.assert_allclose(
            rewards_to_go(rewards, mask, gamma)[0].numpy(), expected, rtol=1e-10, atol=1e-10
        )


def inputs_of(scores, uid, lengths=None, **others):
    """Build rows with an outcome on their last token, by default of two tokens each."""
    lengths = [2] * len(scores) if lengths is None else lengths
    mask = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    rewards = torch.full(mask.shape, NAN, dtype=torch.float64).masked_fill(mask, 0.0)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[row, length - 1] = score

    return AdvantageInputs(
        token_level_rewards=rewards, response_mask=mask, uid=np.array(list(uid), dtype=object), **others
    )


def per_row(kind, inputs, **config):
    """Return the advantage of each row's first token, which equals that of all its tokens."""
    advantages, _ = ADVANTAGE_ESTIMATORS[kind](inputs, AdvantageConfig(estimator=kind, **config))
    mask = inputs.response_mask
    assert torch.equal(advantages, torch.where(mask, advantages[:, :1], 0.0))
    return advantages[:, 0].tolist()


def test_grpo_by_hand():
    # a: 1, 3 -> mean 2, unbiased deviation sqrt(2); b: one sample; c: equal outcomes
    inputs = inputs_of([1.0, 5.0, 3.0, 4.0, 4.0], "abacc", [2, 1, 2, 1, 2])
    half = 0.5**0.5
    assert per_row(AdvantageEstimator.grpo, inputs) == pytest.approx([-half, 0.0, half, 0.0, 0.0], rel=1e-5)
    assert per_row(AdvantageEstimator.grpo, inputs, normalize_by_std=False) == [-1.0, 0.0, 1.0, 0.0, 0.0]


def test_grpo_pass_k_by_hand():
    # a: 1, 5, 3 -> 5 - 3 for the best; b: the best twice; c: one sample. deviation of 1, 5, 3: 2
    inputs = inputs_of([1.0, 5.0, 3.0, 2.0, 2.0, 0.0, 7.0], "aaabbbc")
    assert per_row(AdvantageEstimator.grpo_pass_k, inputs, normalize_by_std=False) == [
        0.0,
        2.0,
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]
    assert per_row(AdvantageEstimator.grpo_pass_k, inputs) == pytest.approx(
        [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], rel=1e-5
    )


def test_rloo_by_hand():
    # a: 1 - (3 + 8)/2, 3 - (1 + 8)/2, 8 - (1 + 3)/2; b: one sample
    inputs = inputs_of([1.0, 3.0, 8.0, 4.0], "aaab")
    assert per_row(AdvantageEstimator.rloo, inputs) == pytest.approx([-4.5, -1.5, 6.0, 0.0])


def test_opo_by_hand():
    # baseline (1 x 3 + 3 x 1) / 4 = 1.5
    inputs = inputs_of([3.0, 1.0, 9.0], "aab", [1, 3, 2])
    assert per_row(AdvantageEstimator.opo, inputs) == pytest.approx([1.5, -0.5, 0.0])


def test_gpg_by_hand():
    # B = 5, M = 3 (b: equal, c: one sample): alpha = 5 / 2
    inputs = inputs_of([0.0, 1.0, 2.0, 2.0, 7.0], "aabbc")
    assert per_row(AdvantageEstimator.gpg, inputs) == pytest.approx([-1.25, 1.25, 0.0, 0.0, 0.0])


def test_reinforce_plus_plus_by_hand():
    # gamma 0.5: rewards to go 1, 2 and 6; mean 3, unbiased variance 7
    mask = torch.tensor([[True, True], [True, False]])
    rewards = torch.tensor([[0.0, 2.0], [6.0, NAN]])
    inputs = AdvantageInputs(
        token_level_rewards=rewards, response_mask=mask, uid=np.array(["a", "b"], dtype=object)
    )
    advantages, returns = ADVANTAGE_ESTIMATORS[AdvantageEstimator.reinforce_plus_plus](
        inputs, AdvantageConfig(gamma=0.5)
    )
    root = 7**0.5
    torch.testing.assert_close(advantages, torch.tensor([[-2 / root, -1 / root], [3 / root, 0.0]]))
    assert returns.tolist() == [[1.0, 2.0], [6.0, 0.0]]


def test_reinforce_plus_plus_baseline_by_hand():
    # centered: -1 (twice), 1, 0 (b: one sample); mean -1/4, variance (2 x (3/4)^2 + (5/4)^2 + (1/4)^2) / 3 =
    # 11/12
    inputs = inputs_of([1.0, 3.0, 5.0], "aab", [2, 1, 1])
    root = (11 / 12) ** 0.5
    expected = [-0.75 / root, 1.25 / root, 0.25 / root]
    assert per_row(AdvantageEstimator.reinforce_plus_plus_baseline, inputs) == pytest.approx(
        expected, rel=1e-6
    )


def test_remax_by_hand():
    inputs = inputs_of([1.0, 3.0], "aa", baseline_scores=torch.tensor([0.5, 4.0]))
    assert per_row(AdvantageEstimator.remax, inputs) == [0.5, -1.0]


def test_gdpo_by_hand():
    # part 1: (0, 2) -> deviation sqrt(2): -+1/sqrt(2); part 2, weight 3: equal in a, 1 and 0 in b ->
    # +-3/sqrt(2); totals sum to 0
    parts = torch.tensor([[0.0, 1.0], [2.0, 1.0], [5.0, 1.0], [5.0, 0.0]], dtype=torch.float64)
    inputs = inputs_of([0.0] * 4, "aabb", score_parts=parts, score_weights=torch.tensor([1.0, 3.0]))
    totals = [-(0.5**0.5), 0.5**0.5, 3 * 0.5**0.5, -3 * 0.5**0.5]
    scale = (sum(x * x for x in totals) / 3) ** 0.5
    assert per_row(AdvantageEstimator.gdpo, inputs) == pytest.approx([x / scale for x in totals], rel=1e-5)


def test_gdpo_leaves_out_a_function_without_an_opinion():
    """Of part 1, sample 1 is left out: the others, 0 and 2, deviate by -+1/sqrt(2) as if they were alone. In
    group b, part 2 has one opinion only, which is compared with nothing."""
    parts = torch.tensor([[0.0, 1.0], [NAN, 1.0], [2.0, 1.0], [5.0, NAN], [5.0, 7.0]], dtype=torch.float64)
    inputs = inputs_of([0.0] * 5, "aaabb", score_parts=parts, score_weights=torch.tensor([1.0, 3.0]))
    totals = [-(0.5**0.5), 0.0, 0.5**0.5, 0.0, 0.0]
    scale = (sum(x * x for x in totals) / 4) ** 0.5
    assert per_row(AdvantageEstimator.gdpo, inputs) == pytest.approx([x / scale for x in totals], rel=1e-5)


def test_optimal_token_baseline_by_hand():
    # squared norms 1 - 2p + q: row 1: 1 - 1 + 0.5 = 0.5 twice; row 2: 1 - 0.5 + 0.25 = 0.75. Scores 1 and 5.
    # t = 0: (1 x 0.5 + 5 x 0.75) / 1.25 = 3.4; t = 1: row 1 alone
    squares = torch.tensor([[0.5, 0.5], [0.25, NAN]], dtype=torch.float64)
    log_probs = torch.tensor([[0.5, 0.5], [0.25, NAN]], dtype=torch.float64).log()
    inputs = inputs_of([1.0, 5.0], "aa", [2, 1], sum_pi_squared=squares, old_log_probs=log_probs)
    advantages, returns = ADVANTAGE_ESTIMATORS[AdvantageEstimator.optimal_token_baseline](
        inputs, AdvantageConfig()
    )
    torch.testing.assert_close(advantages, torch.tensor([[-2.4, 0.0], [1.6, 0.0]], dtype=torch.float64))
    assert returns.tolist() == [[1.0, 1.0], [5.0, 0.0]]


def test_distillation_by_hand():
    """The second row ends after one token: later values have no effect, and neither has a reward."""
    inputs = distilled([[-1.0, -3.0], [-0.5, NAN]], [[-2.0, -1.0], [-0.25, INF]])
    advantages, returns = ADVANTAGE_ESTIMATORS[AdvantageEstimator.distillation](
        inputs, AdvantageConfig(distillation=DistillationConfig(coefficient=0.5))
    )
    # 0.5 x (-1 + 2), 0.5 x (-3 + 1), 0.5 x (-0.5 + 0.25)
    assert advantages.tolist() == [[0.5, -1.0], [-0.125, 0.0]]
    assert returns.tolist() == advantages.tolist()
    # (-2 + 1) + (-1 + 3) + (-0.25 + 0.5) = 1.25 over three tokens
    found = distillation_metrics(inputs.teacher_log_prob, inputs.old_log_probs, inputs.response_mask)
    assert found == {"distillation/reverse_kl/mean": pytest.approx(1.25 / 3)}


def test_distillation_mixes_with_rewards_by_weight():
    """Scores 1 and 5: the mean is 3, so the group's advantages are -2 and 2 without the deviation."""
    inputs = distilled([[-1.0, -3.0], [-0.5, NAN]], [[-2.0, -1.0], [-0.25, INF]])
    section = DistillationConfig(coefficient=2.0, reward_weight=0.25)
    config = AdvantageConfig(normalize_by_std=False, distillation=section)
    advantages, _ = ADVANTAGE_ESTIMATORS[AdvantageEstimator.distillation](inputs, config)
    assert advantages.tolist() == [[2.0 - 0.5, -4.0 - 0.5], [-0.5 + 0.5, 0.0]]


def distilled(teacher, old):
    """Return two samples of one prompt with the scores 1 and 5, of two tokens and one token."""
    teacher_log_prob, old_log_probs = (torch.tensor(rows, dtype=torch.float64) for rows in (teacher, old))
    return inputs_of([1.0, 5.0], "aa", [2, 1], teacher_log_prob=teacher_log_prob, old_log_probs=old_log_probs)


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
@settings(max_examples=30, deadline=None)
@given(mask=masks(max_rows=7), seed=st.integers(0, 1000), weight=st.sampled_from([0.0, 0.5, 2.0]))
def test_distillation_is_the_reference_with_any_weights(coefficient, mask, seed, weight):
    batch = batch_of(mask, seed)
    section = DistillationConfig(coefficient=coefficient, reward_weight=weight)
    config = AdvantageConfig(estimator=AdvantageEstimator.distillation, distillation=section)
    got = ADVANTAGE_ESTIMATORS[config.estimator](AdvantageInputs(**poisoned(batch)), config)
    expected, _ = reference_advantages.advantages(
        "distillation", {key: x.tolist() for key, x in batch.items()}, config
    )
    np.testing.assert_allclose(
        got.advantages.numpy(), np.array(expected).reshape(mask.shape), rtol=1e-9, atol=1e-9
    )


def test_maxrl_by_hand():
    """Groups of scores 0, 0, 1, 3 (mean 1), 0, 0 (no signal), and 2 alone."""
    mask = torch.ones(7, 1, dtype=torch.bool)
    scores = torch.tensor([[0.0], [0.0], [1.0], [3.0], [0.0], [0.0], [2.0]])
    uid = np.array(list("aaaabbc"), dtype=object)
    inputs = AdvantageInputs(token_level_rewards=scores, response_mask=mask, uid=uid)
    advantages = ADVANTAGE_ESTIMATORS[AdvantageEstimator.maxrl](inputs, AdvantageConfig()).advantages
    assert advantages.flatten().tolist() == [-1.0, -1.0, 0.0, 2.0, 0.0, 0.0, 0.0]

    scores[3] = -1.0
    negative = AdvantageInputs(token_level_rewards=scores, response_mask=mask, uid=uid)
    with pytest.raises(ValueError, match="the sample a has -1; use rewards of 0 or more"):
        ADVANTAGE_ESTIMATORS[AdvantageEstimator.maxrl](negative, AdvantageConfig())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_maxrl_expects_the_gradient_of_the_log_likelihood_up_to_an_order(p):
    """Over all outcomes of a group of n: the gradient of log p, expanded up to (1 - p)^(n - 1), in the logit."""
    n = 5
    expected = 0.0
    for successes in range(1, n):
        probability = math.comb(n, successes) * p**successes * (1 - p) ** (n - successes)
        scores = torch.tensor([[1.0]] * successes + [[0.0]] * (n - successes), dtype=torch.float64)
        inputs = AdvantageInputs(
            token_level_rewards=scores,
            response_mask=torch.ones(n, 1, dtype=torch.bool),
            uid=np.array(["a"] * n, dtype=object),
        )
        advantages = ADVANTAGE_ESTIMATORS[AdvantageEstimator.maxrl](
            inputs, AdvantageConfig()
        ).advantages.flatten()
        # d log p / d logit is 1 - p for a success, and -p for a failure.
        slopes = torch.where(scores.flatten() > 0, 1 - p, -p)
        expected += probability * float((advantages * slopes).mean())
    series = sum((1 - p) ** (k - 1) for k in range(1, n))  # d/dp of the sum of -(1 - p)^k / k
    assert expected == pytest.approx(series * p * (1 - p))


def batch_of(mask, seed, kind=None):
    """Generate random inputs of all estimators by name.

    There are few outcomes, so that groups have equal ones, and groups differ in size. Some are negative, unless
    the estimator refuses them.
    """
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-1, 3, mask.shape, generator=generator).double()
    if kind is not None and kind.needs.outcomes:
        rewards = rewards.abs()
    uid = np.array(
        [f"prompt-{int(k)}" for k in torch.randint(0, 3, (len(mask),), generator=generator)], dtype=object
    )

    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "uid": uid,
        "values": normal(mask, seed + 1),
        "baseline_scores": normal(mask, seed + 2)[:, 0].contiguous(),
        "score_parts": torch.randint(0, 3, (len(mask), 2), generator=generator).double(),
        "score_weights": torch.tensor([1.0, 0.5], dtype=torch.float64),
        "old_log_probs": -normal(mask, seed + 3).abs(),
        "sum_pi_squared": normal(mask, seed + 4).abs().clamp(max=1.0),
        "teacher_log_prob": -normal(mask, seed + 5).abs(),
    }


PER_TOKEN = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared", "teacher_log_prob")


def poisoned(batch, value=NAN):
    return {
        key: poison(x, batch["response_mask"], value) if key in PER_TOKEN else x for key, x in batch.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(
    mask=masks(max_rows=7), seed=st.integers(0, 1000), by_std=st.booleans(), gamma=FRACTIONS, lam=FRACTIONS
)
def test_matches_the_reference_whatever_stands_in_masked_slots(kind, mask, seed, by_std, gamma, lam):
    batch = batch_of(mask, seed, kind)
    config = AdvantageConfig(estimator=kind, normalize_by_std=by_std, gamma=gamma, lam=lam)
    got = ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**poisoned(batch)), config)
    expected = reference_advantages.advantages(
        kind.value, {key: x.tolist() for key, x in batch.items()}, config
    )
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), np.array(theirs).reshape(mask.shape), rtol=1e-7, atol=1e-7)
    assert got.advantages.dtype == got.returns.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(mask=masks(min_rows=2, max_rows=7), seed=st.integers(0, 1000))
def test_the_order_of_rows_and_longer_padding_change_nothing(kind, mask, seed):
    batch = batch_of(mask, seed, kind)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))

    def moved(x):
        return x[order.numpy() if isinstance(x, np.ndarray) else order]

    def padded(key, x):
        return torch.nn.functional.pad(x, (0, 3)) if key in (*PER_TOKEN, "response_mask") else x

    shuffled = {key: x if key == "score_weights" else padded(key, moved(x)) for key, x in batch.items()}
    config = AdvantageConfig(estimator=kind, gamma=0.9, lam=0.8)
    straight = ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**poisoned(batch)), config)
    other = ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**poisoned(shuffled, INF)), config)
    for ours, theirs in zip(other, straight, strict=True):
        torch.testing.assert_close(ours[:, : mask.shape[1]], theirs[order])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(mask=masks(min_rows=2), seed=st.integers(0, 1000))
def test_a_row_without_a_token_changes_nothing_for_the_others(kind, mask, seed):
    batch = batch_of(mask, seed, kind)

    def with_empty_row(key, x):
        if key == "score_weights":
            return x
        if key == "uid":
            return np.append(x, x[0])
        return torch.cat(
            [x, torch.zeros_like(x[:1]) if x.dtype is torch.bool else torch.full_like(x[:1], 7.0)]
        )

    config = AdvantageConfig(estimator=kind, gamma=0.9, lam=0.8)
    alone = ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**batch), config)
    beside = ADVANTAGE_ESTIMATORS[kind](
        AdvantageInputs(**{key: with_empty_row(key, x) for key, x in batch.items()}), config
    )

    for with_it, without in zip(beside, alone, strict=True):
        torch.testing.assert_close(with_it[:-1], without)
        assert not with_it[-1].any()


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize(("scores", "uid"), [([0.7] * 3, "aaa"), ([0.1, 0.2, 0.3], "abc"), ([5.0], "a")])
def test_equal_outcomes_and_groups_of_one_have_no_advantage(kind, scores, uid):
    """The advantages are exactly 0, so that rounding errors are not normalized.

    The optimal token baseline does not normalize.
    """
    size = torch.tensor(scores, dtype=torch.float64)
    others = {"score_parts": size[:, None].expand(-1, 2), "sum_pi_squared": torch.full((len(scores), 2), 0.5)}
    inputs = inputs_of(scores, uid, **others, old_log_probs=torch.full((len(scores), 2), -1.0))
    rounding = 1e-6 if kind is AdvantageEstimator.optimal_token_baseline and uid == "aaa" else 0.0
    assert per_row(kind, inputs) == pytest.approx([0.0] * len(scores), abs=rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_valid_token_of_the_batch(kind):
    batch = batch_of(torch.tensor([[False, True, False], [False, False, False]]), 3, kind)
    advantages, returns = ADVANTAGE_ESTIMATORS[kind](
        AdvantageInputs(**poisoned(batch)), AdvantageConfig(estimator=kind)
    )

    if kind is AdvantageEstimator.remax:
        assert advantages[0, 1] == batch["token_level_rewards"][0, 1] - batch["baseline_scores"][0]
    elif kind is AdvantageEstimator.distillation:
        assert advantages[0, 1] == batch["teacher_log_prob"][0, 1] - batch["old_log_probs"][0, 1]
    else:
        assert not advantages.any()

    assert torch.isfinite(returns).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_valid_token_is_all_zero(kind):
    batch = batch_of(torch.zeros(3, 2, dtype=torch.bool), 0)
    advantages, returns = ADVANTAGE_ESTIMATORS[kind](
        AdvantageInputs(**poisoned(batch)), AdvantageConfig(estimator=kind)
    )
    assert torch.equal(advantages, torch.zeros(3, 2, dtype=torch.float64))
    assert torch.equal(returns, torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_that_fills_its_length_is_like_any_other(kind):
    """The last token of the row is not followed by padding."""
    full = batch_of(torch.ones(3, 4, dtype=torch.bool), 0)
    padded = {
        key: torch.nn.functional.pad(x, (0, 2)) if key in (*PER_TOKEN, "response_mask") else x
        for key, x in full.items()
    }
    config = AdvantageConfig(estimator=kind, gamma=0.9, lam=0.8)

    for ours, theirs in zip(
        *(ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**each), config) for each in (full, padded)), strict=True
    ):
        torch.testing.assert_close(ours, theirs[:, :4])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_rewards_that_are_no_numbers_are_refused_with_the_uid(value):
    rewards = torch.tensor([[0.0, 1.0], [value, 0.0], [0.0, value]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    uid = np.array(["good", "bad", "masked"], dtype=object)

    with pytest.raises(
        ValueError,
        match=rf"token_level_rewards is {value} for 1 of 3 samples \(uid bad\).*fix the reward function",
    ):
        AdvantageInputs(token_level_rewards=rewards, response_mask=mask, uid=uid)


@pytest.mark.parametrize(
    ("kind", "key"), [(AdvantageEstimator.remax, "baseline_scores"), (AdvantageEstimator.gdpo, "score_parts")]
)
def test_other_scores_that_are_no_numbers_are_refused_with_the_uid(kind, key):
    batch = batch_of(torch.ones(3, 2, dtype=torch.bool), 0) | {"uid": np.array(["a", "b", "c"], dtype=object)}
    batch[key][1] = NAN
    with pytest.raises(ValueError, match=r"score is nan for 1 of 3 samples \(uid b\)"):
        ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**batch), AdvantageConfig(estimator=kind))


def test_many_bad_samples_are_not_all_listed():
    with pytest.raises(ValueError, match=r"for 10 of 10 samples \(uid a, b, c, d, e, f, g, h, \.\.\.\)"):
        inputs_of([NAN] * 10, "abcdefghij")


@pytest.mark.parametrize(
    ("kind", "missing", "hint"),
    [
        (AdvantageEstimator.gae, "values", "use grpo"),
        (AdvantageEstimator.remax, "baseline_scores", "use rloo"),
        (AdvantageEstimator.gdpo, "score_parts", "use grpo"),
        (AdvantageEstimator.optimal_token_baseline, "old_log_probs", "use rloo"),
        (AdvantageEstimator.optimal_token_baseline, "sum_pi_squared", "use rloo"),
        (AdvantageEstimator.distillation, "teacher_log_prob", "add run.teacher.log_probs"),
        (AdvantageEstimator.distillation, "old_log_probs", "add run.actor.log_probs"),
    ],
)
def test_a_missing_input_is_named_with_its_estimator(kind, missing, hint):
    batch = batch_of(torch.ones(2, 2, dtype=torch.bool), 0) | {missing: None}
    with pytest.raises(ValueError, match=f"estimator={kind.value} needs .*`{missing}`.*{hint}"):
        ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**batch), AdvantageConfig(estimator=kind))


def test_registry_covers_every_estimator():
    assert set(ADVANTAGE_ESTIMATORS) == set(AdvantageEstimator)


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimator_declares_whether_it_compares_samples(kind):
    """Exactly the estimators that compare samples assign 0 to a prompt's only sample.

    An undeclared one would train on zeros with `rollout.n` 1.
    """
    batch = batch_of(torch.ones(3, 2, dtype=torch.bool), 1, kind)
    batch["uid"] = np.array(["a", "b", "c"], dtype=object)
    advantages, _ = ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**batch), AdvantageConfig(estimator=kind))
    assert advantages.any() == (not kind.needs.compares_samples)


@pytest.mark.parametrize("kind", KINDS)
def test_an_estimator_declares_what_it_reads(kind):
    """An estimator works with exactly its declared inputs, and reports a missing one."""
    declared = [name for need, names in INPUTS_OF.items() if getattr(kind.needs, need) for name in names]
    assert {field.name for field in fields(kind.needs)} == {
        "compares_samples",
        "outcomes",
        "reward",
        *INPUTS_OF,
    }
    batch = batch_of(torch.ones(3, 2, dtype=torch.bool), 1, kind)
    given = {key: batch[key] for key in ("token_level_rewards", "response_mask", "uid", *declared)}
    ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**given), AdvantageConfig(estimator=kind))

    for name in declared:
        with pytest.raises(ValueError, match=f"estimator={kind.value} needs .*`{name}`"):
            ADVANTAGE_ESTIMATORS[kind](
                AdvantageInputs(**given | {name: None}), AdvantageConfig(estimator=kind)
            )


def test_registered_gae_whitens_the_advantages_and_not_the_returns():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    batch = batch_of(mask, 0)
    advantages, returns = ADVANTAGE_ESTIMATORS[AdvantageEstimator.gae](
        AdvantageInputs(**batch), AdvantageConfig(gamma=0.9, lam=0.8)
    )
    assert abs(float(advantages[mask].mean())) < 1e-12
    assert float(advantages[mask].var()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(
        returns, gae(batch["token_level_rewards"], batch["values"], mask, 0.9, 0.8).returns
    )


@settings(max_examples=60, deadline=None)
@given(
    uid=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12),
    num_rows=st.integers(1, 14),
    data=st.data(),
)
def test_blocks_hold_whole_groups_and_each_row_once(uid, num_rows, data):
    counts = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(uid), max_size=len(uid))))
    groups = Groups.of(np.array(uid, dtype=object), counts)
    blocks = [rows.tolist() for rows in groups.blocks(num_rows)]
    assert sorted(row for rows in blocks for row in rows) == list(range(len(uid)))
    homes = [{int(groups.index[row]) for row in rows} for rows in blocks]
    assert sum(len(home) for home in homes) == len(set().union(*homes))

    for rows in blocks[:-1]:
        last = [row for row in rows if groups.index[row] == groups.index[rows[-1]]]
        assert len(rows) - len(last) < num_rows <= len(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_many_blocks_is_like_one_of_one(kind, monkeypatch):
    batch = batch_of(torch.rand(12, 5, generator=torch.Generator().manual_seed(0)) > 0.3, 1, kind)
    config = AdvantageConfig(estimator=kind, gamma=0.9, lam=0.8)
    whole = ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**batch), config)
    monkeypatch.setattr(ragged, "_CACHED_ELEMENTS", 10)
    torch.testing.assert_close(ADVANTAGE_ESTIMATORS[kind](AdvantageInputs(**batch), config), whole)
