"""Losses of pairs of answers: direct preference optimization, and reward models.

Rows 2 i and 2 i + 1 of a micro-batch are the preferred and the rejected answer of a pair (data/pairs.py).
The losses are those of TRL's trainers, but the SFT term of cpo and orpo is a mean over the tokens of each
answer, and then over pairs.

Shapes: n pairs, b = 2 n rows, R padded response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.losses import LossShare
from megarl.algorithms.masked import masked
from megarl.algorithms.policy_losses import log_of_others
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


def of_pairs(values: Tensor) -> Tensor:
    """Return values (b,) of rows by pair, (n, 2): of the preferred and the rejected answer."""
    return values.view(-1, 2)


def _difference(pairs: Tensor) -> Tensor:
    """Return the value of the preferred answer minus that of the rejected one, (n,)."""
    return pairs[:, 0] - pairs[:, 1]


def dpo_losses(values: Tensor, config: DPOLossConfig) -> Tensor:
    """Return the loss of each pair without its SFT term, (n,).

    Args:
        values: (n, 2), the preferred answer first: log policy - log reference of each answer, or log policy
            if the loss has no reference. The sum over its tokens, or the mean if the loss is per token.
    """
    if config.kind is DPOLossKind.ipo:
        return (_difference(values) - 1 / (2 * config.beta)).square()
    if config.kind is DPOLossKind.orpo:
        return -config.beta * logsigmoid(_difference(values - log_of_others(values)))
    margin = config.margin if config.kind is DPOLossKind.simpo else 0.0
    return -logsigmoid(config.beta * _difference(values) - margin)


def bradley_terry_losses(scores: Tensor, margins: Tensor, center_coefficient: float) -> Tensor:
    """Return the loss of each pair, (n,).

    It is -log sigmoid(chosen - rejected - margin) + center_coefficient * (chosen + rejected)^2: Bradley-Terry
    with a margin (Touvron et al. 2023, Llama 2) and centering (Eisenstein et al. 2023).

    Args:
        scores: (n, 2), the score of each conversation. The preferred one comes first.
        margins: (n,)
        center_coefficient: The weight of the squared sum.
    """
    losses = -logsigmoid(_difference(scores) - margins)
    if center_coefficient:
        losses = losses + center_coefficient * scores.sum(dim=1).square()
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

    Outputs that the loss reads: `log_probs`. Rows: `response_mask`, and `ref_log_prob` if the loss has a
    reference. An answer's reward is beta times the sum of its log-ratios, whatever the loss. Without a
    reference it is beta times what the loss compares, the sum or the mean of its log-probs.

    Metrics, all means over pairs:

    - `dpo/loss`.
    - `dpo/accuracy`: share of pairs whose preferred answer has the higher reward.
    - `dpo/margin`: difference of the rewards.
    - `dpo/chosen_reward`, `dpo/rejected_reward`: the rewards.
    - `dpo/chosen_log_prob`, `dpo/rejected_log_prob`: the policy's log-probs of the answers.

    Attributes:
        num_pairs: The number of pairs of the whole mini-batch.
    """

    name: ClassVar[str] = "dpo"
    extras = ()
    config: DPOLossConfig
    num_pairs: int

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads in addition to the model's."""
        return (REFERENCE_LOG_PROBS,) if self.config.kind.needs.reference else ()

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        mask = rows["response_mask"]
        needs = self.config.kind.needs
        num_tokens = mask.sum(dim=1).clamp(min=1)
        log_probs = masked(outputs["log_probs"], mask).sum(dim=1)
        compared = log_probs
        if needs.reference:
            compared = masked(outputs["log_probs"] - rows[REFERENCE_LOG_PROBS], mask).sum(dim=1)
        of_loss = compared / num_tokens if needs.per_token else compared

        losses = dpo_losses(of_pairs(of_loss), self.config)
        if needs.sft:
            losses = losses - self.config.sft_coefficient * of_pairs(log_probs / num_tokens)[:, 0]

        # The implicit reward of DPO is beta times the log-ratio.
        rewards = of_pairs(self.config.beta * (compared if needs.reference else of_loss).detach())
        of_policy = of_pairs(log_probs.detach())
        values = {
            "loss": losses,
            "accuracy": (_difference(rewards) > 0).to(losses.dtype),
            "margin": _difference(rewards),
            "chosen_reward": rewards[:, 0],
            "rejected_reward": rewards[:, 1],
            "chosen_log_prob": of_policy[:, 0],
            "rejected_log_prob": of_policy[:, 1],
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
    extras = ()
    columns: ClassVar[tuple[str, ...]] = (MARGINS,)
    config: RewardModelLossConfig
    num_pairs: int

    def __call__(self, outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> LossShare:
        mask = rows["response_mask"]
        scores = of_pairs(masked(outputs["values"], mask).sum(dim=1))
        # Chosen and rejected rows alternate. The chosen row has the margin of its pair.
        margins = masked(rows[MARGINS], mask).sum(dim=1)[0::2]
        losses = bradley_terry_losses(scores, margins, self.config.center_coefficient)
        values = {
            "loss": losses,
            "accuracy": (_difference(scores) > 0).to(losses.dtype),
            "margin": _difference(scores),
            "chosen_score": scores[:, 0],
            "rejected_score": scores[:, 1],
        }
        return _share(self.name, values, mask, self.num_pairs)


PairLoss = DPOLoss | RewardModelLoss


def pair_loss(config: PreferenceConfig, num_pairs: int) -> PairLoss:
    """Return the loss of a run for a mini-batch of this number of pairs."""
    if isinstance(config, DPOConfig):
        return DPOLoss(config=config.loss, num_pairs=num_pairs)
    assert isinstance(config, RewardModelRunConfig)
    return RewardModelLoss(config=config.loss, num_pairs=num_pairs)
