"""Losses of pairs of answers: direct preference optimization, and reward models.

Rows 2 i and 2 i + 1 of a micro-batch are the preferred and the rejected answer of a pair (data/pairs.py).
The losses are those of TRL's DPOTrainer and RewardTrainer.

Shapes: n pairs, b = 2 n rows, R padded response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.losses import LossShare
from megarl.algorithms.masked import masked
from megarl.batch.metrics import Metric
from megarl.batch.token_rows import MARGINS, REFERENCE_LOG_PROBS
from megarl.config.schema import (
    DPOConfig,
    DPOLossConfig,
    DPOLossKind,
    PreferenceConfig,
    RewardModelLossConfig,
    RewardModelRunConfig,
)


class PairValues(NamedTuple):
    """A value of each answer of n pairs, (n,) each."""

    chosen: Tensor
    rejected: Tensor

    @classmethod
    def of_rows(cls, values: Tensor) -> PairValues:
        """Split values (b,) of rows."""
        return cls(values[0::2], values[1::2])

    @property
    def difference(self) -> Tensor:
        return self.chosen - self.rejected


def dpo_losses(log_ratios: PairValues, kind: DPOLossKind, beta: float) -> Tensor:
    """Return the loss of each pair, (n,).

    Args:
        log_ratios: log policy - log reference of each answer: the sum over its tokens for `sigmoid`, the mean
            for the other kinds.
        beta: Its coefficient.
    """
    if kind is DPOLossKind.ipo:
        return (log_ratios.difference - 1 / (2 * beta)).square()
    return -logsigmoid(beta * log_ratios.difference)


def bradley_terry_losses(scores: PairValues, margins: Tensor, center_coefficient: float) -> Tensor:
    """Return the loss of each pair, (n,).

    It is -log sigmoid(chosen - rejected - margin) + center_coefficient * (chosen + rejected)^2: Bradley-Terry
    with a margin (Touvron et al. 2023, Llama 2) and centering (Eisenstein et al. 2023).

    Args:
        scores: The score of each conversation.
        margins: (n,)
        center_coefficient: The weight of the squared sum.
    """
    losses = -logsigmoid(scores.difference - margins)
    if center_coefficient:
        losses = losses + center_coefficient * (scores.chosen + scores.rejected).square()
    return losses


def _share(name: str, values: Mapping[str, Tensor], mask: Tensor, num_pairs: int) -> LossShare:
    """Return the share of some pairs in means over the `num_pairs` of the whole mini-batch.

    Args:
        values: The values (n,) of the pairs by metric, with `loss`.
    """
    # A pair that only pads a micro-batch has no valid token.
    is_counted = mask.any(dim=1)[0::2]
    means = {key: masked(each, is_counted).sum() / num_pairs for key, each in values.items()}
    return LossShare(means["loss"], {f"{name}/{key}": Metric.sum(mean) for key, mean in means.items()})


@dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """The configured loss of direct preference optimization, averaged over the pairs of a mini-batch.

    Outputs that the loss reads: `log_probs`. Rows: `response_mask` and `ref_log_prob`. An answer's reward is
    beta times the sum of its log-ratios, whatever the loss.

    Metrics, all means over pairs:

    - `dpo/loss`.
    - `dpo/accuracy`: share of pairs whose preferred answer has the higher reward.
    - `dpo/margin`: difference of the rewards.
    - `dpo/chosen_reward`, `dpo/rejected_reward`: the rewards.
    - `dpo/chosen_log_prob`, `dpo/rejected_log_prob`: the policy's log-probs of the answers.

    Attributes:
        columns: The columns that it reads in addition to the model's.
        num_pairs: The number of pairs of the whole mini-batch.
    """

    name: ClassVar[str] = "dpo"
    extras: ClassVar[tuple[()]] = ()
    columns: ClassVar[tuple[str, ...]] = (REFERENCE_LOG_PROBS,)
    config: DPOLossConfig
    num_pairs: int

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        mask = rows["response_mask"]
        log_probs = masked(outputs["log_probs"], mask).sum(dim=1)
        log_ratios = masked(outputs["log_probs"] - rows[REFERENCE_LOG_PROBS], mask).sum(dim=1)

        # Some losses read the mean over an answer's tokens, so that long answers have no advantage.
        of_loss = log_ratios
        if self.config.kind is not DPOLossKind.sigmoid:
            of_loss = log_ratios / mask.sum(dim=1).clamp(min=1)
        losses = dpo_losses(PairValues.of_rows(of_loss), self.config.kind, self.config.beta)

        # The implicit reward of DPO is beta times the log-ratio.
        rewards = PairValues.of_rows(self.config.beta * log_ratios.detach())
        of_policy = PairValues.of_rows(log_probs.detach())
        values = {
            "loss": losses,
            "accuracy": (rewards.difference > 0).to(losses.dtype),
            "margin": rewards.difference,
            "chosen_reward": rewards.chosen,
            "rejected_reward": rewards.rejected,
            "chosen_log_prob": of_policy.chosen,
            "rejected_log_prob": of_policy.rejected,
        }
        return _share(self.name, values, mask, self.num_pairs)


@dataclass(frozen=True, kw_only=True)
class RewardModelLoss:
    """The Bradley-Terry loss of a reward model, averaged over the pairs of a mini-batch.

    Outputs that the loss reads: `values`. Rows: `response_mask`, which has one valid token per row, where the
    score is read, and `margins`.

    Metrics, all means over pairs:

    - `reward_model/loss`.
    - `reward_model/accuracy`: share of pairs whose preferred answer has the higher score.
    - `reward_model/margin`: difference of the scores.
    - `reward_model/chosen_score`, `reward_model/rejected_score`: the scores.

    Attributes:
        columns: The columns that it reads in addition to the model's.
        num_pairs: The number of pairs of the whole mini-batch.
    """

    name: ClassVar[str] = "reward_model"
    extras: ClassVar[tuple[()]] = ()
    columns: ClassVar[tuple[str, ...]] = (MARGINS,)
    config: RewardModelLossConfig
    num_pairs: int

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        mask = rows["response_mask"]
        scores = PairValues.of_rows(masked(outputs["values"], mask).sum(dim=1))
        # Chosen and rejected rows alternate. The chosen row has the margin of its pair.
        margins = masked(rows[MARGINS], mask).sum(dim=1)[0::2]
        losses = bradley_terry_losses(scores, margins, self.config.center_coefficient)
        values = {
            "loss": losses,
            "accuracy": (scores.difference > 0).to(losses.dtype),
            "margin": scores.difference,
            "chosen_score": scores.chosen,
            "rejected_score": scores.rejected,
        }
        return _share(self.name, values, mask, self.num_pairs)


PairLoss = DPOLoss | RewardModelLoss


def pair_loss(config: PreferenceConfig, num_pairs: int) -> PairLoss:
    """Return the loss of a run for a mini-batch of this number of pairs."""
    if isinstance(config, DPOConfig):
        return DPOLoss(config=config.loss, num_pairs=num_pairs)
    assert isinstance(config, RewardModelRunConfig)
    return RewardModelLoss(config=config.loss, num_pairs=num_pairs)
