"""The section `algorithm`: advantages, losses, KL penalty, rollout correction, and sample selection."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from megarl.config.kinds import AdvantageEstimator, Aggregation, DPOLossKind, PolicyLossKind
from megarl.config.schema.keys import PathKind, Reader, names, only_with, ranged


class KLWhere(str, Enum):
    none = "none"  # no reference policy
    reward = "reward"  # subtracted from each token's reward
    loss = "loss"  # added to the policy loss


class KLEstimator(str, Enum):
    k1 = "k1"  # log p - log q: unbiased
    abs_k1 = "abs_k1"  # the absolute value of k1
    k2 = "k2"  # half the square of k1
    k3 = "k3"  # q/p - 1 - log(q/p), clamped at 10: never negative; clamped tokens have no gradient
    k3_unclamped = "k3_unclamped"  # k3 without the clamp: unbiased
    # k1 in value, with the gradient of k2, which is an unbiased gradient of the divergence; for the loss
    k1_straight_through = "k1_straight_through"
    abs_k1_straight_through = "abs_k1_straight_through"  # abs_k1 in value, with the gradient of k2
    k3_straight_through = "k3_straight_through"  # k3 in value, with the gradient of k2


class KLControllerKind(str, Enum):
    fixed = "fixed"  # the coefficient is constant
    adaptive = "adaptive"  # the coefficient is adjusted so that the KL approaches `target`


class CorrectionLevel(str, Enum):
    """The unit over which an importance weight (trainer / rollout policy) is computed."""

    none = "none"  # no weights
    token = "token"  # each token
    sequence = "sequence"  # the product over a response
    geometric = "geometric"  # the geometric mean over a response


class CorrectionKind(str, Enum):
    truncate = "truncate"  # a weight above `high` becomes `high`
    mask = "mask"  # a weight outside [low, high] becomes 0


class RejectionEstimator(str, Enum):
    none = "none"  # no response is rejected
    k1 = "k1"  # rollout minus trainer log-prob
    k2 = "k2"  # half the square of k1
    k3 = "k3"  # never negative, unbiased


class RejectionLevel(str, Enum):
    sequence = "sequence"  # the sum over a response
    geometric = "geometric"  # the mean over a response's tokens
    token = "token"  # each token by itself, so that only tokens are rejected
    batch = "batch"  # the mean over the batch: the tokens with the largest estimates are rejected


class DistillationKL(str, Enum):
    reverse = "reverse"  # KL(policy || teacher): the policy avoids what the teacher finds unlikely
    forward = "forward"  # KL(teacher || policy): the policy covers what the teacher finds likely


# Custom functions get the whole section, so they may read keys that their built-in counterpart does not.
_FUNCTION = Reader(".function", example="FILE.py:NAME")


def _of_estimators(*estimators: AdvantageEstimator) -> tuple[Reader, Reader]:
    return Reader(".estimator", estimators), _FUNCTION


def _of_losses(*kinds: PolicyLossKind) -> tuple[Reader, Reader]:
    return Reader(".kind", kinds), _FUNCTION


_CLIPPED = tuple(
    kind
    for kind in PolicyLossKind
    if kind
    not in (
        PolicyLossKind.sapo,
        PolicyLossKind.vespo,
        PolicyLossKind.topr,
        PolicyLossKind.dro,
        PolicyLossKind.gpg,
        PolicyLossKind.kl_cov,
    )
)
WITH_CRITIC = Reader(
    "algorithm.advantage.estimator", tuple(each for each in AdvantageEstimator if each.needs.critic)
)
_IN_RESPONSE_SUMS = Reader(".aggregation", (Aggregation.sequence_mean_token_sum_norm,))


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """How the estimator `distillation` learns from the teacher, and weighs the rewards against it."""

    # weight of the teacher: of its log-prob minus the policy's at each token, or of the loss top_k_kl
    coefficient: float = ranged(1.0, above=0)
    # number of the teacher's most likely tokens at each position, such as 64, over which the loss top_k_kl
    # computes the KL; null: no such loss, and the log-ratio of the sampled token is the advantage
    top_k: int | None = ranged(None, at_least=1)
    kl: DistillationKL = only_with(
        DistillationKL.reverse,
        Reader(".top_k", example="64"),
        is_refused=True,
        why="samples of the policy estimate the reverse KL",
    )  # with top_k: the direction of the divergence
    # weight of the advantage that grpo computes from the rewards; 0: rewards have no effect on the training
    reward_weight: float = ranged(0.0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    # how advantages are computed from rewards; see Algorithms
    estimator: AdvantageEstimator = AdvantageEstimator.gae
    function: str | None = field(
        default=None, metadata=names(PathKind.function)
    )  # FILE.py:NAME of a custom function that replaces the estimator's; it receives the same inputs
    gamma: float = only_with(
        ranged(1.0, at_least=0, at_most=1),
        *_of_estimators(AdvantageEstimator.gae, AdvantageEstimator.reinforce_plus_plus),
    )  # discount factor
    lam: float = only_with(
        ranged(1.0, at_least=0, at_most=1), *_of_estimators(AdvantageEstimator.gae)
    )  # lambda; 1 relies on rewards, 0 on the critic
    # divide by the group's standard deviation; false is Dr. GRPO (Liu et al. 2025)
    normalize_by_std: bool = only_with(
        True,
        *_of_estimators(
            AdvantageEstimator.grpo, AdvantageEstimator.grpo_pass_k, AdvantageEstimator.distillation
        ),
    )
    distillation: DistillationConfig = only_with(
        field(default_factory=DistillationConfig),
        *_of_estimators(*(each for each in AdvantageEstimator if each.needs.teacher)),
        is_refused=True,
    )


@dataclass(frozen=True, kw_only=True)
class SAPOConfig:
    """How sharply a token's weight decays as its ratio moves away from 1 (Gao et al. 2025).

    By default the decay is sharper for tokens whose probability is to decrease.
    """

    temperature_positive: float = ranged(1.0, above=0)  # temperature for tokens with a positive advantage
    temperature_negative: float = ranged(1.05, above=0)  # temperature for all other tokens


@dataclass(frozen=True, kw_only=True)
class VESPOConfig:
    """The weight w^power exp(rate (1 - w)) of a response with the ratio w (Shen et al. 2026).

    By default a ratio above 1 weighs less if the advantage is positive, and one below 1 if it is negative.
    """

    power_positive: float = ranged(2.0, above=0)  # exponent of the ratio for advantages of 0 or more
    rate_positive: float = ranged(3.0, above=0)  # decay with the ratio for advantages of 0 or more
    power_negative: float = ranged(3.0, above=0)  # exponent of the ratio for negative advantages
    rate_negative: float = ranged(2.0, above=0)  # decay with the ratio for negative advantages


_LOSS_FUNCTION = Reader("algorithm.policy_loss.function", example="FILE.py:NAME")
_OF_CLIP_COV = Reader("algorithm.policy_loss.kind", (PolicyLossKind.clip_cov,)), _LOSS_FUNCTION


@dataclass(frozen=True, kw_only=True)
class CovarianceConfig:
    """The tokens that clip_cov and kl_cov treat separately (Cui et al. 2025)."""

    share: float = ranged(0.0002, above=0, at_most=1)  # fraction of a mini-batch's tokens that are selected
    low: float = only_with(1.0, *_OF_CLIP_COV)  # lower bound of the covariances to select from
    high: float = only_with(5.0, *_OF_CLIP_COV)  # upper bound of the covariances to select from
    kl_coefficient: float = only_with(
        ranged(1.0, at_least=0),
        Reader("algorithm.policy_loss.kind", (PolicyLossKind.kl_cov,)),
        _LOSS_FUNCTION,
    )  # weight of the KL penalty


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    kind: PolicyLossKind = PolicyLossKind.ppo_clip  # loss of one token; see Algorithms
    function: str | None = field(
        default=None, metadata=names(PathKind.function)
    )  # FILE.py:NAME of a custom function that replaces the kind's; it receives the same inputs
    # lower clip bound: the ratio is clipped to [1 - clip_low, 1 + clip_high]. gmpo: its logarithm to
    # [-clip_low, clip_high]. dppo_*: divergence limits for tokens that became less (clip_low) and more
    # (clip_high) likely
    clip_low: float = only_with(ranged(0.2, above=0, below=1), *_of_losses(*_CLIPPED))
    clip_high: float = only_with(ranged(0.2, above=0), *_of_losses(*_CLIPPED))  # upper clip bound
    # dual clip, the limit c > 1 of the ratio where A < 0 (Ye et al. 2020); dppo_*: limit of every ratio
    clip_dual: float | None = only_with(
        ranged(None, above=1),
        *_of_losses(*(each for each in PolicyLossKind if each.needs.dual_clip)),
        is_refused=True,
    )
    aggregation: Aggregation = Aggregation.token_mean  # how token losses are reduced to one number
    # constant that divides each row's sum
    norm_tokens: int | None = only_with(ranged(None, at_least=1), _IN_RESPONSE_SUMS, is_refused=True)
    # responses of negative advantage lose their loss if their tokens' mean log-prob has fallen by more than
    # this, in nats, since they were sampled (DeepSeek-V3.2: off-policy sequence masking); null: none do
    off_policy_limit: float | None = ranged(None, above=0)
    sapo: SAPOConfig = only_with(field(default_factory=SAPOConfig), *_of_losses(PolicyLossKind.sapo))
    vespo: VESPOConfig = only_with(field(default_factory=VESPOConfig), *_of_losses(PolicyLossKind.vespo))
    dro_beta: float = only_with(
        ranged(0.1, above=0), *_of_losses(PolicyLossKind.dro)
    )  # weight of the quadratic penalty
    covariance: CovarianceConfig = only_with(
        field(default_factory=CovarianceConfig), *_of_losses(PolicyLossKind.clip_cov, PolicyLossKind.kl_cov)
    )


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    # clip range around the value before the update; null disables clipping
    clip: float | None = ranged(0.2, above=0)
    aggregation: Aggregation = Aggregation.token_mean  # as in policy_loss
    # constant that divides each row's sum, as in policy_loss
    norm_tokens: int | None = only_with(ranged(None, at_least=1), _IN_RESPONSE_SUMS, is_refused=True)


@dataclass(frozen=True, kw_only=True)
class KLControllerConfig:
    # controller of the coefficient in the reward
    kind: KLControllerKind = only_with(
        KLControllerKind.fixed,
        Reader("algorithm.kl.where", (KLWhere.reward,)),
        is_refused=True,
        why="it adjusts the penalty in the reward",
    )
    target: float = only_with(
        ranged(0.1, above=0), Reader(".kind", (KLControllerKind.adaptive,))
    )  # target KL
    # number of samples over which the coefficient adapts
    horizon: int = only_with(ranged(10000, at_least=1), Reader(".kind", (KLControllerKind.adaptive,)))


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    where: KLWhere = KLWhere.reward  # where the KL penalty against the reference policy is applied
    # how the divergence is estimated from a sampled token
    estimator: KLEstimator = only_with(
        KLEstimator.k1, Reader(".where", (KLWhere.reward, KLWhere.loss)), is_usual=True
    )
    # weight of the penalty; 0 removes the reference policy, as `where: none` does
    coefficient: float = only_with(
        ranged(0.001, at_least=0), Reader(".where", (KLWhere.reward, KLWhere.loss)), is_usual=True
    )
    controller: KLControllerConfig = field(default_factory=KLControllerConfig)

    @property
    def in_reward(self) -> bool:
        return self.where is KLWhere.reward and self.coefficient != 0

    @property
    def in_loss(self) -> bool:
        return self.where is KLWhere.loss and self.coefficient != 0


_REJECTING = Reader(
    ".estimator", tuple(each for each in RejectionEstimator if each is not RejectionEstimator.none)
)
_WEIGHTING = Reader(".level", tuple(each for each in CorrectionLevel if each is not CorrectionLevel.none))


@dataclass(frozen=True, kw_only=True)
class RejectionConfig:
    """Responses, or tokens, are rejected if their KL(rollout || trainer), in nats, is outside [low, high]."""

    estimator: RejectionEstimator = RejectionEstimator.none  # estimator of the divergence
    # unit over which the estimate is computed
    level: RejectionLevel = only_with(RejectionLevel.geometric, _REJECTING)
    low: float | None = only_with(None, _REJECTING)  # lower bound, for k1, which can be negative
    high: float = only_with(ranged(0.01, above=0), _REJECTING)  # upper bound


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """Corrects for the difference between the log-probs of the rollout engine and the trainer.

    It uses importance weights in the policy loss, and rejects responses.
    """

    level: CorrectionLevel = CorrectionLevel.none  # unit over which a weight is computed
    # how weights out of bounds are handled
    kind: CorrectionKind = only_with(CorrectionKind.truncate, _WEIGHTING)
    low: float = only_with(
        only_with(ranged(0.5, at_least=0), Reader(".kind", (CorrectionKind.mask,))), _WEIGHTING
    )  # lower bound of a weight
    high: float = only_with(ranged(2.0, above=0), _WEIGHTING)  # upper bound of a weight
    rejection: RejectionConfig = field(default_factory=RejectionConfig)
    # use the rollout engine's log-probs as the old log-probs; the trainer does not recompute them
    bypass: bool = False

    @property
    def enabled(self) -> bool:
        return (
            self.level is not CorrectionLevel.none or self.rejection.estimator is not RejectionEstimator.none
        )


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """A penalty that grows linearly over the last tokens of a response (Yu et al. 2025, DAPO, eq. 13).

    The penalized tokens are the last before `data.max_response_length`.
    """

    # fraction of max_response_length over which the penalty grows; 0: no penalty
    buffer_share: float = ranged(0.0, at_least=0, at_most=1)
    # penalty of a response that fills max_response_length
    penalty: float = only_with(ranged(1.0, above=0), Reader(".buffer_share", example="0.2"))

    def buffer_tokens(self, max_response_length: int) -> int:
        """Return the number of tokens over which the penalty grows; at least one if the share is not 0."""
        return max(1, round(self.buffer_share * max_response_length)) if self.buffer_share else 0


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Prompts whose samples all have the same score are dropped and replaced (DAPO, section 3.2)."""

    enabled: bool = False  # requires an estimator that compares the samples of a prompt
    # maximum number of prompts sampled for a step, as a multiple of trainer.prompts_per_step
    max_generations: int = only_with(ranged(4, at_least=1), Reader(".enabled", example="true"))


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    value_loss: ValueLossConfig = only_with(field(default_factory=ValueLossConfig), WITH_CRITIC)
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coefficient: float = 0.0  # weight of the mean entropy, which is subtracted from the policy loss
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)

    @property
    def reads_rewards(self) -> bool:
        """Whether the rewards affect the training."""
        advantage = self.advantage
        return advantage.estimator.needs.reward or advantage.distillation.reward_weight > 0

    @property
    def teacher_top_k(self) -> int | None:
        """The number of the teacher's most likely tokens that the loss top_k_kl reads; None without it."""
        advantage = self.advantage
        return advantage.distillation.top_k if advantage.estimator.needs.teacher else None

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether the advantages depend on the trainer's log-probs of the samples."""
        return self.advantage.estimator.needs.old_log_probs and self.teacher_top_k is None


@dataclass(frozen=True, kw_only=True)
class DPOLossConfig:
    kind: DPOLossKind = DPOLossKind.sigmoid  # loss of a pair; see Preferences
    # weight of the difference of the answers, and so how strongly the policy is held to the reference; with
    # sigmoid_norm, use values such as 5, with simpo 2. orpo: weight of the odds
    beta: float = ranged(0.1, above=0)
    # the difference that beta times the mean log-probs should have
    margin: float = only_with(ranged(0.5, at_least=0), Reader(".kind", (DPOLossKind.simpo,)), is_refused=True)
    # weight of the negative log-likelihood of the preferred answer, the mean over its tokens
    sft_coefficient: float = only_with(
        ranged(1.0, at_least=0),
        Reader(".kind", tuple(each for each in DPOLossKind if each.needs.sft)),
        is_refused=True,
    )


@dataclass(frozen=True, kw_only=True)
class RewardModelLossConfig:
    """The Bradley-Terry loss, -log sigmoid(score of chosen - score of rejected - margin)."""

    # weight of the mean squared sum of a pair's scores, which keeps scores around 0 (Eisenstein et al. 2023),
    # such as 0.01
    center_coefficient: float = ranged(0.0, at_least=0)
