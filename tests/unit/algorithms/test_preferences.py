"""Test the losses of pairs of answers: by hand, in any cut of the pairs, and what they cost to send."""

from __future__ import annotations

import pickle
from math import exp, log

import pytest
import torch

from megarl.algorithms.preferences import DPOLoss, PairLoss, RewardModelLoss
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.schema import DPOLossConfig, DPOLossKind, RewardModelLossConfig

# Two pairs: answers of 2 and 1 tokens, and of 1 and 3 tokens.
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]]).bool()
LOG_PROBS = torch.tensor([[-1.0, -2.0, 9.0], [-4.0, 9.0, 9.0], [-3.0, 9.0, 9.0], [-1.0, -1.0, -1.0]])
REFERENCE = torch.tensor([[-2.0, -3.0, 7.0], [-3.0, 7.0, 7.0], [-2.0, 7.0, 7.0], [-1.0, -2.0, -3.0]])
# The sums of the log-ratios are 2 and -1, and -1 and 3.
DIFFERENCES = (3.0, -4.0)
MEAN_DIFFERENCES = (2.0, -2.0)
BETA = 0.5


def softplus(value: float) -> float:
    return log(1 + exp(value))


def odds(chosen: float, rejected: float) -> float:
    """Return the difference of the log-odds of two probabilities, which are given by their logarithms."""
    first, second = (log(exp(each) / (1 - exp(each))) for each in (chosen, rejected))
    return first - second


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (DPOLossKind.sigmoid, sum(softplus(-BETA * each) for each in DIFFERENCES) / 2),
        (DPOLossKind.ipo, sum((each - 1) ** 2 for each in MEAN_DIFFERENCES) / 2),
        (DPOLossKind.sigmoid_norm, sum(softplus(-BETA * each) for each in MEAN_DIFFERENCES) / 2),
    ],
)
def test_dpo_by_hand(kind: DPOLossKind, expected: float) -> None:
    loss = DPOLoss(config=DPOLossConfig(kind=kind, beta=BETA), num_pairs=2)
    value, metrics = loss({"log_probs": LOG_PROBS}, {"response_mask": MASK, "ref_log_prob": REFERENCE})
    assert float(value) == pytest.approx(expected)
    assert values_of(metrics) == pytest.approx(
        {
            "dpo/loss": expected,
            "dpo/accuracy": 0.5,
            "dpo/margin": -0.25,
            "dpo/chosen_reward": 0.25,
            "dpo/rejected_reward": 0.5,
            "dpo/chosen_log_prob": -3.0,
            "dpo/rejected_log_prob": -3.5,
        }
    )


@pytest.mark.parametrize(
    ("kind", "settings", "expected", "rewards"),
    [
        # sums of the log-probs: -3 and -4, -3 and -3; means: -1.5 and -4, -3 and -1
        (
            DPOLossKind.simpo,
            {"margin": 0.75},
            (softplus(0.75 - BETA * 2.5) + softplus(0.75 + BETA * 2.0)) / 2,
            (-1.5, -4.0, -3.0, -1.0),
        ),
        (
            DPOLossKind.cpo,
            {"sft_coefficient": 2.0},
            (softplus(-BETA * 1.0) + softplus(0.0)) / 2 + 2.0 * (1.5 + 3.0) / 2,
            (-3.0, -4.0, -3.0, -3.0),
        ),
        (
            DPOLossKind.orpo,
            {},
            (BETA * softplus(-odds(-1.5, -4.0)) + BETA * softplus(-odds(-3.0, -1.0)) + 1.5 + 3.0) / 2,
            (-1.5, -4.0, -3.0, -1.0),
        ),
    ],
)
def test_losses_without_a_reference_by_hand(
    kind: DPOLossKind, settings: dict[str, float], expected: float, rewards: tuple[float, ...]
) -> None:
    loss = DPOLoss(config=DPOLossConfig(kind=kind, beta=BETA, **settings), num_pairs=2)
    assert loss.columns == ()
    value, metrics = loss({"log_probs": LOG_PROBS}, {"response_mask": MASK})
    assert float(value) == pytest.approx(expected)
    values = values_of(metrics)
    assert values["dpo/chosen_reward"] == pytest.approx(BETA * (rewards[0] + rewards[2]) / 2)
    assert values["dpo/rejected_reward"] == pytest.approx(BETA * (rewards[1] + rewards[3]) / 2)


def test_bradley_terry_by_hand() -> None:
    """The scores are 1 and 3, and 2 and 0, and their margins 0 and 0.5."""
    mask = torch.tensor([[0, 1], [1, 0], [1, 0], [0, 1]]).bool()
    values = torch.tensor([[7.0, 1.0], [3.0, 7.0], [2.0, 7.0], [7.0, 0.0]])
    margins = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.5, 0.5], [0.5, 0.5]])
    loss = RewardModelLoss(config=RewardModelLossConfig(center_coefficient=0.1), num_pairs=2)
    value, metrics = loss({"values": values}, {"response_mask": mask, "margins": margins})
    expected = (softplus(2.0) + 0.1 * 16 + softplus(-1.5) + 0.1 * 4) / 2
    assert float(value) == pytest.approx(expected)
    assert values_of(metrics) == pytest.approx(
        {
            "reward_model/loss": expected,
            "reward_model/accuracy": 0.5,
            "reward_model/margin": 0.0,
            "reward_model/chosen_score": 1.5,
            "reward_model/rejected_score": 1.5,
        }
    )


LOSSES: list[PairLoss] = [
    *(DPOLoss(config=DPOLossConfig(kind=kind), num_pairs=2) for kind in DPOLossKind),
    RewardModelLoss(config=RewardModelLossConfig(center_coefficient=0.1), num_pairs=2),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_pairs_add_up_and_fillers_and_masked_tokens_do_not_count(loss: PairLoss) -> None:
    rows = {
        "response_mask": MASK if isinstance(loss, DPOLoss) else MASK & (MASK.cumsum(1) == 1),
        "ref_log_prob": REFERENCE.masked_fill(~MASK, torch.nan),
        "margins": torch.full(MASK.shape, 0.3),
    }
    output = "log_probs" if isinstance(loss, DPOLoss) else "values"
    no_token = torch.zeros_like(MASK)

    def run(*parts: tuple[list[int], bool]) -> tuple[torch.Tensor, dict[str, float]]:
        leaf = LOG_PROBS.masked_fill(~MASK, torch.nan).requires_grad_()
        shares = [
            loss(
                {output: leaf[index]},
                {key: value[index] for key, value in rows.items()}
                | ({"response_mask": no_token[index]} if is_filler else {}),
            )
            for index, is_filler in parts
        ]
        sum(share.loss for share in shares).backward()  # type: ignore[union-attr]
        assert leaf.grad is not None
        return leaf.grad, values_of(merge_metrics([share.metrics for share in shares]))

    whole = run(([0, 1, 2, 3], False))
    parts = run(([2, 3], False), ([0, 1], False), ([0, 1], True))
    torch.testing.assert_close(parts, whole)
    assert torch.isfinite(whole[0]).all()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_losses_travel_to_workers(loss: PairLoss) -> None:
    travelling = pickle.dumps(loss)
    assert pickle.loads(travelling) == loss
    assert len(travelling) < 4096
