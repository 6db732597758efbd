"""The section `algorithm`: advantages, losses, KL penalty, rollout correction, and which samples are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class AdvantageEstimator(str, Enum):
    gae = "gae"
    grpo = "grpo"
    grpo_pass_k = "grpo_pass_k"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    opo = "opo"
    gpg = "gpg"
    remax = "remax"
    gdpo = "gdpo"
    optimal_token_baseline = "optimal_token_baseline"


class PolicyLossKind(str, Enum):
    ppo_clip = "ppo_clip"
    gspo = "gspo"
    gmpo = "gmpo"
    cispo = "cispo"
    sapo = "sapo"
    gpg = "gpg"
    clip_cov = "clip_cov"
    kl_cov = "kl_cov"
    dppo_tv = "dppo_tv"
    dppo_kl = "dppo_kl"


class Aggregation(str, Enum):
    token_mean = "token_mean"
    sequence_mean_token_sum = "sequence_mean_token_sum"
    sequence_mean_token_mean = "sequence_mean_token_mean"
    sequence_mean_token_sum_norm = "sequence_mean_token_sum_norm"


class KLWhere(str, Enum):
    none = "none"
    reward = "reward"
    loss = "loss"


class KLEstimator(str, Enum):
    k1 = "k1"
    abs_k1 = "abs_k1"
    k2 = "k2"
    k3 = "k3"
    # The value of the estimator with the gradient of k2, which is that of the divergence: for the loss.
    k1_straight_through = "k1_straight_through"
    abs_k1_straight_through = "abs_k1_straight_through"
    k3_straight_through = "k3_straight_through"


class KLControllerKind(str, Enum):
    fixed = "fixed"
    adaptive = "adaptive"


class CorrectionLevel(str, Enum):
    """What a weight trainer / rollout policy is taken over."""

    none = "none"
    token = "token"
    sequence = "sequence"  # the product over a response
    geometric = "geometric"  # the geometric mean over a response


class CorrectionKind(str, Enum):
    truncate = "truncate"  # a weight above `high` becomes `high`
    mask = "mask"  # a weight outside [low, high] becomes 0


class RejectionEstimator(str, Enum):
    none = "none"
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class RejectionLevel(str, Enum):
    sequence = "sequence"  # the sum over a response
    geometric = "geometric"  # the mean over a response's tokens


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    estimator: AdvantageEstimator = AdvantageEstimator.gae
    gamma: float = 1.0
    lam: float = 1.0
    normalize_by_std: bool = True  # grpo, grpo_pass_k: divide by the group's deviation; false is Dr. GRPO (Liu et al. 2025)


@dataclass(frozen=True, kw_only=True)
class SAPOConfig:
    """How sharply a ratio's weight falls away from 1; the larger for tokens that are to become less likely (Gao et al. 2025)."""

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05


@dataclass(frozen=True, kw_only=True)
class CovarianceConfig:
    """Which tokens clip_cov and kl_cov treat apart (Cui et al. 2025)."""

    share: float = 0.0002  # of a mini-batch's tokens
    low: float = 1.0  # clip_cov: the covariances that it draws from
    high: float = 5.0
    kl_coefficient: float = 1.0  # kl_cov


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    kind: PolicyLossKind = PolicyLossKind.ppo_clip
    # The ratio is kept in [1 - clip_low, 1 + clip_high]. gmpo: its logarithm in [-clip_low, clip_high]. dppo_*: limits of the divergence
    # for tokens that became less and more likely. sapo, gpg and kl_cov have no bounds.
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None  # ppo_clip: limit c > 1 of the ratio where A < 0 (Ye et al. 2020); dppo_*: limit of every ratio
    aggregation: Aggregation = Aggregation.token_mean
    norm_tokens: int | None = None  # sequence_mean_token_sum_norm: the constant that a row's sum is divided by
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    clip: float | None = 0.2


@dataclass(frozen=True, kw_only=True)
class KLControllerConfig:
    kind: KLControllerKind = KLControllerKind.fixed
    target: float = 0.1
    horizon: int = 10000  # samples


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    where: KLWhere = KLWhere.reward
    estimator: KLEstimator = KLEstimator.k1
    coefficient: float = 0.001
    controller: KLControllerConfig = field(default_factory=KLControllerConfig)


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """Responses are left out whose estimated KL(rollout || trainer), in nats, is outside [low, high]."""

    estimator: RejectionEstimator = RejectionEstimator.none
    level: RejectionLevel = RejectionLevel.geometric
    low: float | None = None  # for k1, which can be negative
    high: float = 0.01


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """The rollout engine's log-probs are not quite the trainer's: weights for the policy loss, and responses to leave out."""

    level: CorrectionLevel = CorrectionLevel.none
    kind: CorrectionKind = CorrectionKind.truncate
    low: float = 0.5  # mask
    high: float = 2.0
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    bypass: bool = False  # the rollout engine's log-probs are the old ones, so that the trainer does not compute them again

    @property
    def enabled(self) -> bool:
        return self.level is not CorrectionLevel.none or self.rejection.estimator is not RejectionEstimator.none


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """A penalty that grows over the last tokens of `data.max_response_length` (Yu et al. 2025, DAPO, eq. 13)."""

    buffer_share: float = 0.0  # of max_response_length, over which it grows; 0: no penalty
    penalty: float = 1.0  # of a response that fills max_response_length

    def buffer_tokens(self, max_response_length: int) -> int:
        """At least one where there is a share."""
        return max(1, round(self.buffer_share * max_response_length)) if self.buffer_share else 0


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Prompts whose samples all have the same score are dropped and others take their place (DAPO, section 3.2)."""

    enabled: bool = False
    max_generations: int = 4  # rounds of generation in one step, the first included


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    value_loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coefficient: float = 0.0
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
