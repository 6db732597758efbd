import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import ActorLoss, CriticLoss, MiniBatchCounts, SFTLoss
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    KLConfig,
    KLEstimator,
    KLWhere,
    PolicyLossConfig,
    PolicyLossKind,
    ValueLossConfig,
)
from tests.unit.algorithms import reference
from tests.unit.algorithms.strategies import masks, normal, poison

LN2 = 0.6931471805599453


NORM_TOKENS = 4


def algorithm(
    aggregation=Aggregation.token_mean,
    kl=KLWhere.loss,
    entropy_coefficient=0.01,
    clip_dual=3.0,
    kind=PolicyLossKind.ppo_clip,
    estimator=KLEstimator.k2,
):
    return AlgorithmConfig(
        policy_loss=PolicyLossConfig(
            kind=kind, aggregation=aggregation, clip_dual=clip_dual, norm_tokens=NORM_TOKENS
        ),
        kl=KLConfig(where=kl, estimator=estimator, coefficient=0.1),
        entropy_coefficient=entropy_coefficient,
    )


def inputs(mask, seed):
    outputs = {
        "log_probs": normal(mask, seed),
        "entropy": normal(mask, seed + 1),
        "values": normal(mask, seed + 2),
    }
    names = ["old_log_probs", "advantages", "ref_log_prob", "values", "returns"]
    rows = {name: normal(mask, seed + 3 + k) for k, name in enumerate(names)}
    rows |= {"rollout_weights": normal(mask, seed + 8).abs(), "selected_tokens": normal(mask, seed + 9) > 0.5}

    return outputs, rows | {"response_mask": mask}


def losses(mask, aggregation):
    counts = MiniBatchCounts.of(mask)
    return {
        "actor": ActorLoss(algorithm=algorithm(aggregation), counts=counts),
        "critic": CriticLoss(value_loss=ValueLossConfig(clip=0.2), counts=counts),
        "sft": SFTLoss(counts=counts),
        **{
            kind.value: ActorLoss(algorithm=algorithm(aggregation, kind=kind), counts=counts)
            for kind in PolicyLossKind
        },
        **{
            f"kl {each.value}": ActorLoss(algorithm=algorithm(aggregation, estimator=each), counts=counts)
            for each in KLEstimator
        },
    }


def test_actor_loss_by_hand():
    # ratio 2, A = 1: loss -1.2 (clipped); ratio 1, A = -1: loss 1. entropy mean 0.5; KL k2: (1, 0) -> 0.5 and
    # 0, mean 0.25
    mask = torch.tensor([[True, True, False]])
    outputs = {"log_probs": torch.tensor([[LN2, 0.0, 9.0]]), "entropy": torch.tensor([[0.25, 0.75, 9.0]])}
    rows = {
        "response_mask": mask,
        "old_log_probs": torch.zeros(1, 3),
        "advantages": torch.tensor([[1.0, -1.0, 9.0]]),
        "ref_log_prob": torch.tensor([[LN2 - 1.0, 0.0, 9.0]]),
    }
    loss, metrics = ActorLoss(algorithm=algorithm(), counts=MiniBatchCounts.of(mask))(outputs, rows)
    expected = {
        "actor/pg_loss": -0.1,
        "actor/pg_clipfrac": 0.5,
        "actor/pg_clipfrac_dual": 0.0,
        "actor/approx_kl": -LN2 / 2,
        "actor/ratio_max": 2.0,
        "actor/ratio_min": 1.0,
        "actor/entropy": 0.5,
        "actor/kl_loss": 0.25,
    }
    assert values_of(metrics) == pytest.approx(expected, rel=1e-5)
    assert float(loss) == pytest.approx(-0.1 - 0.01 * 0.5 + 0.1 * 0.25, rel=1e-5)


def test_actor_loss_without_extras_reads_only_what_it_needs():
    mask = torch.tensor([[True, True]])
    loss_function = ActorLoss(
        algorithm=algorithm(kl=KLWhere.reward, entropy_coefficient=0.0, clip_dual=None),
        counts=MiniBatchCounts.of(mask),
    )
    rows = {"response_mask": mask, "old_log_probs": torch.zeros(1, 2), "advantages": torch.ones(1, 2)}
    loss, metrics = loss_function({"log_probs": torch.zeros(1, 2)}, rows)
    assert float(loss) == -1.0
    assert set(metrics) == {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/approx_kl",
        "actor/ratio_max",
        "actor/ratio_min",
    }
    assert loss_function.extras == ()


def test_critic_loss_by_hand():
    mask = torch.tensor([[True, True, False]])
    rows = {
        "values": torch.tensor([[1.0, 1.0, 0.0]]),
        "returns": torch.tensor([[2.0, 0.0, 0.0]]),
        "response_mask": mask,
    }
    loss_function = CriticLoss(value_loss=ValueLossConfig(clip=0.5), counts=MiniBatchCounts.of(mask))
    loss, metrics = loss_function({"values": torch.tensor([[2.0, 2.0, 9.0]])}, rows)
    assert float(loss) == pytest.approx((0.125 + 2.0) / 2)
    expected = {"critic/vf_loss": 1.0625, "critic/vf_clipfrac": 0.5, "critic/vpred_mean": 2.0}
    assert values_of(metrics) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_the_value_loss_is_aggregated_as_the_policy_loss_is(aggregation):
    """The rows have 3, 1 and 0 tokens, in two micro-batches."""
    mask = torch.tensor([[True, True, True], [False, True, False], [False, False, False]])
    new = torch.tensor([[1.0, 2.0, 3.0], [9.0, 4.0, 9.0], [9.0] * 3])
    rows = {"values": torch.zeros(3, 3), "returns": torch.zeros(3, 3)}
    per_token = 0.5 * new.square()  # 0.5, 2, 4.5 and 8
    expected = {
        Aggregation.token_mean: 15 / 4,
        Aggregation.sequence_mean_token_sum: (7 + 8) / 2,
        Aggregation.sequence_mean_token_mean: (7 / 3 + 8) / 2,
        Aggregation.sequence_mean_token_sum_norm: (7 / 4 + 8 / 4) / 2,
    }
    assert per_token[mask].sum() == 15
    norm = 4 if aggregation is Aggregation.sequence_mean_token_sum_norm else None
    config = ValueLossConfig(clip=None, aggregation=aggregation, norm_tokens=norm)
    loss_function = CriticLoss(value_loss=config, counts=MiniBatchCounts.of(mask))
    shares = [
        loss_function(
            {"values": new[part]},
            {"response_mask": mask[part]} | {key: value[part] for key, value in rows.items()},
        )[0]
        for part in (slice(0, 1), slice(1, 3))
    ]
    assert float(sum(shares)) == pytest.approx(expected[aggregation])


def test_sft_loss_by_hand():
    mask = torch.tensor([[True, True], [True, False]])
    loss, metrics = SFTLoss(counts=MiniBatchCounts.of(mask))(
        {"log_probs": torch.tensor([[-1.0, -2.0], [-6.0, 5.0]])}, {"response_mask": mask}
    )
    assert float(loss) == values_of(metrics)["sft/loss"] == 3.0


def test_rollout_weights_multiply_the_policy_loss_alone():
    # ratio 1: token losses -1 and 2; weights 0.5 and 3; KL k2 of 1 and 0
    mask = torch.tensor([[True, True, False]])
    rows = {
        "response_mask": mask,
        "advantages": torch.tensor([[1.0, -2.0, 9.0]]),
        "ref_log_prob": torch.tensor([[-1.0, 0.0, 9.0]]),
        "rollout_weights": torch.tensor([[0.5, 3.0, float("nan")]]),
    }
    loss, metrics = ActorLoss(algorithm=algorithm(entropy_coefficient=0.0), counts=MiniBatchCounts.of(mask))(
        {"log_probs": torch.zeros(1, 3)}, rows
    )
    assert values_of(metrics)["actor/pg_loss"] == pytest.approx((-0.5 + 6.0) / 2)
    assert float(loss) == pytest.approx((-0.5 + 6.0) / 2 + 0.1 * 0.25)


def test_bad_responses_of_old_weights_have_no_loss():
    """Row 0 has fallen by 0.5 per token and row 1 by 0.1; row 2 has fallen too, but is a good one. All rows count
    in the denominator, and the engine's log-probs alone give no weights."""
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    rows = {
        "response_mask": mask,
        "advantages": torch.tensor([[-1.0, -1.0], [-2.0, 7.0], [3.0, 3.0]]),
        "rollout_log_probs": torch.tensor([[-0.5, -0.5], [-0.9, float("nan")], [0.0, 0.0]]) + 1.0,
    }
    log_probs = torch.zeros(3, 2).requires_grad_()
    section = replace(algorithm(entropy_coefficient=0.0), kl=KLConfig(where=KLWhere.none))
    limited = replace(section, policy_loss=replace(section.policy_loss, off_policy_limit=0.2))
    loss, metrics = ActorLoss(algorithm=limited, counts=MiniBatchCounts.of(mask))(
        {"log_probs": log_probs}, rows
    )
    assert float(loss) == pytest.approx((2.0 - 3.0 - 3.0) / 5)
    assert values_of(metrics)["actor/off_policy_fraction"] == pytest.approx(2 / 5)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert gradient[0].tolist() == [0.0, 0.0]

    loss, metrics = ActorLoss(algorithm=section, counts=MiniBatchCounts.of(mask))(
        {"log_probs": log_probs}, rows
    )
    assert float(loss) == pytest.approx((1.0 + 1.0 + 2.0 - 3.0 - 3.0) / 5)
    assert "actor/off_policy_fraction" not in values_of(metrics)


def test_without_old_log_probs_the_loss_is_that_of_equal_ones():
    mask = torch.tensor([[True, True], [True, False]])
    outputs, rows = inputs(mask, 0)
    losses_and_gradients = []

    for old in (None, outputs["log_probs"].clone()):
        leaf = outputs["log_probs"].clone().requires_grad_()
        given_rows = {key: value for key, value in rows.items() if key != "old_log_probs"} | (
            {} if old is None else {"old_log_probs": old}
        )
        loss = losses(mask, Aggregation.token_mean)["actor"](outputs | {"log_probs": leaf}, given_rows).loss
        losses_and_gradients.append((loss.detach(), *torch.autograd.grad(loss, leaf)))

    torch.testing.assert_close(*losses_and_gradients)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@settings(max_examples=25, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000))
def test_actor_loss_matches_the_reference(aggregation, mask, seed):
    outputs, rows = inputs(mask, seed)
    if not mask.any():
        return
    got = losses(mask, aggregation)["actor"](outputs, rows).loss
    keys = ("old_log_probs", "advantages", "ref_log_prob", "rollout_weights")
    data = [outputs["log_probs"], outputs["entropy"], *(rows[key] for key in keys)]
    per_token = [
        [
            weight * ppo_token(new, old, advantage) - 0.01 * entropy + 0.1 * 0.5 * (new - ref) ** 2
            for new, entropy, old, advantage, ref, weight in zip(*row, strict=True)
        ]
        for row in zip(*(x.tolist() for x in data), strict=True)
    ]
    assert float(got) == pytest.approx(
        reference.aggregate(per_token, mask.tolist(), aggregation.value, NORM_TOKENS), rel=1e-9, abs=1e-9
    )


def ppo_token(new, old, advantage):
    return reference.ppo_token(new, old, advantage, 0.2, 0.2, 3.0)


@pytest.mark.parametrize(
    "name",
    [
        "critic",
        "sft",
        *(kind.value for kind in PolicyLossKind),
        *(f"kl {each.value}" for each in KLEstimator),
    ],
)
@settings(max_examples=20, deadline=None)
@given(
    mask=masks(min_rows=2, max_rows=7),
    seed=st.integers(0, 1000),
    cut=st.integers(1, 6),
    aggregation=st.sampled_from(Aggregation),
)
def test_rows_in_any_order_and_cut_add_up_in_loss_gradient_and_metrics(name, mask, seed, cut, aggregation):
    """The mini-batch is the same over micro-batches, over replicas, and in another order, with NaN in masked
    slots."""
    outputs, rows = inputs(mask, seed)
    outputs = {key: poison(value, mask) for key, value in outputs.items()}
    rows = {key: poison(value, mask) if value.is_floating_point() else value for key, value in rows.items()}
    loss_function = losses(mask, aggregation)[name]
    parts = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed)).split(
        min(cut, len(mask))
    )

    def run(index_lists):
        leaves = {key: value.clone().requires_grad_() for key, value in outputs.items()}
        shares = [
            loss_function({k: v[index] for k, v in leaves.items()}, {k: v[index] for k, v in rows.items()})
            for index in index_lists
        ]
        sum(share.loss for share in shares).backward()
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]

        return gradients, values_of(merge_metrics([share.metrics for share in shares]))

    whole = run([torch.arange(len(mask))])
    split = run(parts)
    torch.testing.assert_close(split, whole)
    assert all(torch.isfinite(gradient).all() for gradient in whole[0])


@pytest.mark.parametrize("name", ["actor", "kl k3", "critic", "sft"])
@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_gradcheck_of_a_whole_loss(name, aggregation):
    """The check covers every output that the loss reads, including the entropy and its bonus."""
    mask = torch.tensor([[True, True, False], [True, False, True]])
    outputs, rows = inputs(mask, 1)
    loss_function = losses(mask, aggregation)[name]
    keys = {"critic": ["values"], "sft": ["log_probs"]}.get(name, ["log_probs", "entropy"])
    leaves = tuple(outputs[key].requires_grad_() for key in keys)
    assert torch.autograd.gradcheck(
        lambda *x: loss_function(dict(zip(keys, x, strict=True)), rows).loss, leaves
    )


def test_counts_add_over_ranks():
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    assert (
        MiniBatchCounts.of(mask[:1]) + MiniBatchCounts.of(mask[1:])
        == MiniBatchCounts.of(mask)
        == MiniBatchCounts(num_tokens=5, num_sequences=3)
    )


@pytest.mark.parametrize("name", ["actor", "critic", "sft"])
def test_losses_travel_to_workers(name):
    loss_function = losses(torch.ones(1, 2).bool(), Aggregation.token_mean)[name]
    travelling = pickle.dumps(loss_function)
    assert pickle.loads(travelling) == loss_function
    assert len(travelling) < 4096  # sent to every replica with every mini-batch
