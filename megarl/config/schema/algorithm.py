"""The section `algorithm`: advantages, losses, KL penalty, rollout correction, and which samples are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.kinds import AdvantageEstimator, Aggregation, PolicyLossKind
from megarl.config.schema.keys import InputKind, names, ranged


class KLWhere(str, Enum):
    none = "none"  # no reference policy
    reward = "reward"  # taken off each token's reward
    loss = "loss"  # added to the policy loss


class KLEstimator(str, Enum):
    k1 = "k1"  # log p - log q: unbiased
    abs_k1 = "abs_k1"  # its absolute value
    k2 = "k2"  # half its square
    k3 = "k3"  # q/p - 1 - log(q/p), at most 10: never negative; a token above it has no gradient
    k3_unclamped = "k3_unclamped"  # without the limit: unbiased
    # The value of the estimator with the gradient of k2, which is that of the divergence: for the loss.
    k1_straight_through = "k1_straight_through"
    abs_k1_straight_through = "abs_k1_straight_through"  # likewise
    k3_straight_through = "k3_straight_through"  # likewise


class KLControllerKind(str, Enum):
    fixed = "fixed"  # the coefficient stays
    adaptive = "adaptive"  # the coefficient follows `target`


class CorrectionLevel(str, Enum):
    """What a weight trainer / rollout policy is taken over."""

    none = "none"  # no weights
    token = "token"  # each token
    sequence = "sequence"  # the product over a response
    geometric = "geometric"  # the geometric mean over a response


class CorrectionKind(str, Enum):
    truncate = "truncate"  # a weight above `high` becomes `high`
    mask = "mask"  # a weight outside [low, high] becomes 0


class RejectionEstimator(str, Enum):
    none = "none"  # no response is left out
    k1 = "k1"  # mean of rollout - trainer log-prob
    k2 = "k2"  # mean of half its square
    k3 = "k3"  # never negative, unbiased


class RejectionLevel(str, Enum):
    sequence = "sequence"  # the sum over a response
    geometric = "geometric"  # the mean over a response's tokens


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    # how good a token was, from rewards; see the page on algorithms
    estimator: AdvantageEstimator = AdvantageEstimator.gae
    function: str | None = field(
        default=None, metadata=names(InputKind.code)
    )  # FILE.py:NAME of your own, in the place of the estimator's; it gets what the estimator gets
    gamma: float = ranged(1.0, at_least=0, at_most=1)  # discount of later rewards: gae, reinforce_plus_plus
    lam: float = ranged(1.0, at_least=0, at_most=1)  # gae: 1 trusts the rewards, 0 the critic
    # grpo, grpo_pass_k: divide by the group's deviation; false is Dr. GRPO (Liu et al. 2025)
    normalize_by_std: bool = True


@dataclass(frozen=True, kw_only=True)
class SAPOConfig:
    """How sharply a ratio's weight falls away from 1; the larger for tokens that are to become less likely
    (Gao et al. 2025)."""

    temperature_positive: float = ranged(1.0, above=0)  # of tokens with an advantage above 0
    temperature_negative: float = ranged(1.05, above=0)  # of the others


@dataclass(frozen=True, kw_only=True)
class CovarianceConfig:
    """Which tokens clip_cov and kl_cov treat apart (Cui et al. 2025)."""

    share: float = ranged(0.0002, above=0, at_most=1)  # of a mini-batch's tokens
    low: float = 1.0  # clip_cov: the covariances that it draws from
    high: float = 5.0  # the upper end of those
    kl_coefficient: float = ranged(1.0, at_least=0)  # kl_cov


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    kind: PolicyLossKind = PolicyLossKind.ppo_clip  # the loss of one token; see the page on algorithms
    function: str | None = field(
        default=None, metadata=names(InputKind.code)
    )  # FILE.py:NAME of your own, in the place of the kind's; it gets what the kind gets
    # The ratio is kept in [1 - clip_low, 1 + clip_high]. gmpo: its logarithm in [-clip_low, clip_high].
    # dppo_*: limits of the divergence for tokens that became less and more likely. sapo, gpg and kl_cov have
    # no bounds.
    clip_low: float = ranged(0.2, above=0, below=1)
    clip_high: float = ranged(0.2, above=0)  # as clip_low, above
    # ppo_clip: limit c > 1 of the ratio where A < 0 (Ye et al. 2020); dppo_*: limit of every ratio
    clip_dual: float | None = ranged(None, above=1)
    aggregation: Aggregation = Aggregation.token_mean  # from the losses of tokens to one number
    # sequence_mean_token_sum_norm: the constant that a row's sum is divided by
    norm_tokens: int | None = ranged(None, at_least=1)
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    # how far a value may move from that before the update; null: as far as it likes
    clip: float | None = ranged(0.2, above=0)
    aggregation: Aggregation = Aggregation.token_mean  # as of the policy loss
    norm_tokens: int | None = ranged(None, at_least=1)  # as of the policy loss


@dataclass(frozen=True, kw_only=True)
class KLControllerConfig:
    kind: KLControllerKind = KLControllerKind.fixed  # whether the coefficient in the reward is steered
    target: float = ranged(0.1, above=0)  # adaptive: the KL that the coefficient is steered to
    horizon: int = ranged(10000, at_least=1)  # samples


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    where: KLWhere = KLWhere.reward  # what the divergence from the reference is charged to
    estimator: KLEstimator = KLEstimator.k1  # how the divergence is estimated from a drawn token
    # its weight; with 0 there is no reference, as with `where: none`
    coefficient: float = ranged(0.001, at_least=0)
    controller: KLControllerConfig = field(default_factory=KLControllerConfig)

    @property
    def in_reward(self) -> bool:
        return self.where is KLWhere.reward and self.coefficient != 0

    @property
    def in_loss(self) -> bool:
        return self.where is KLWhere.loss and self.coefficient != 0


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """Responses are left out whose estimated KL(rollout || trainer), in nats, is outside [low, high]."""

    estimator: RejectionEstimator = RejectionEstimator.none  # of the divergence
    level: RejectionLevel = RejectionLevel.geometric  # what the estimate is taken over
    low: float | None = None  # for k1, which can be negative
    high: float = ranged(0.01, above=0)  # responses above it are left out


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """The rollout engine's log-probs are not quite the trainer's: weights for the policy loss, and responses
    to leave out."""

    level: CorrectionLevel = CorrectionLevel.none  # what a weight is taken over
    kind: CorrectionKind = CorrectionKind.truncate  # what becomes of a weight out of bounds
    low: float = ranged(0.5, at_least=0)  # mask
    high: float = ranged(2.0, above=0)  # the largest weight
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    # the rollout engine's log-probs are the old ones, so that the trainer does not compute them again
    bypass: bool = False

    @property
    def enabled(self) -> bool:
        return (
            self.level is not CorrectionLevel.none or self.rejection.estimator is not RejectionEstimator.none
        )


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """A penalty that grows over the last tokens of `data.max_response_length` (Yu et al. 2025, DAPO, eq.
    13)."""

    # of max_response_length, over which it grows; 0: no penalty
    buffer_share: float = ranged(0.0, at_least=0, at_most=1)
    penalty: float = ranged(1.0, above=0)  # of a response that fills max_response_length

    def buffer_tokens(self, max_response_length: int) -> int:
        """At least one where there is a share."""
        return max(1, round(self.buffer_share * max_response_length)) if self.buffer_share else 0


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Prompts whose samples all have the same score are dropped and others take their place (DAPO, section
    3.2)."""

    enabled: bool = False  # needs an estimator that compares the samples of a prompt
    max_generations: int = ranged(4, at_least=1)  # times a step's prompts that may be sampled for it


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coefficient: float = 0.0  # times the mean entropy, taken off the policy loss
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    @property
    def own_functions(self) -> list[tuple[str, str]]:
        """Key and FILE.py:NAME of the user's functions that take the place of megarl's."""
        named = {
            "algorithm.advantage.function": self.advantage.function,
            "algorithm.policy_loss.function": self.policy_loss.function,
        }
        return [(key, reference) for key, reference in named.items() if reference is not None]
