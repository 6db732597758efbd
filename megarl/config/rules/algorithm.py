"""Rules for the section `algorithm`: settings that must not be combined."""

from __future__ import annotations

import re

from megarl.config.finding import Finding, Findings, conflicts, refusals
from megarl.config.roles import needs_reward_model
from megarl.config.schema import (
    Aggregation,
    CorrectionLevel,
    KLEstimator,
    KLWhere,
    PPOConfig,
    RejectionEstimator,
    RejectionLevel,
)

_ESTIMATOR = "algorithm.advantage.estimator"
_REWARD_WEIGHT = "algorithm.advantage.distillation.reward_weight"
_KIND = "algorithm.policy_loss.kind"
_WHERE = "algorithm.kl.where"
_CORRECTION = "algorithm.rollout_correction"
_DYNAMIC = "algorithm.dynamic_sampling"

_STRAIGHT_THROUGH = (
    KLEstimator.k1_straight_through,
    KLEstimator.abs_k1_straight_through,
    KLEstimator.k3_straight_through,
)


def estimator(config: PPOConfig) -> Findings:
    """Check the requirements of the advantage estimator on samples and rewards."""
    kind = config.algorithm.advantage.estimator
    n = config.rollout.n
    needs = kind.needs
    # A reward model adds one score to those of the functions and judges.
    num_scores = len(config.reward.functions) + len(config.reward.judges) + needs_reward_model(config)

    unread = f"{kind.name} reads scores instead of rewards, so a penalty in the rewards has no effect"
    if needs.outcomes:
        unread = f"{kind.name} divides by the mean reward of a prompt's samples, which a penalty would change"
    yield from refusals(
        (
            ("rollout.n", _ESTIMATOR),
            needs.compares_samples and n < 2,
            f"{kind.name} compares the samples of a prompt, but n is {n}, so every advantage would be 0; "
            f"use 2 or more",
        ),
        (
            ("rollout.n", _ESTIMATOR),
            needs.greedy_baseline and n < 2,
            f"{kind.name} generates an additional greedy response to every prompt that is not trained on, "
            f"which with n {n} is half of all responses; use 2 or more",
        ),
        (
            ("reward.functions", _ESTIMATOR),
            needs.score_parts and num_scores == 1,
            f"{kind.name} normalizes several scores separately, but there is only one reward function "
            "(or model); add another, or use grpo",
        ),
        (
            (_WHERE, _ESTIMATOR),
            (needs.score_parts or needs.outcomes) and config.algorithm.kl.in_reward,
            f"{unread}; use where=loss",
        ),
        (
            ("algorithm.overlong.buffer_share", _ESTIMATOR),
            (needs.score_parts or needs.outcomes) and config.algorithm.overlong.buffer_share != 0,
            f"{unread}; use 0, and a reward function that scores the length",
        ),
    )


def teacher(config: PPOConfig) -> Findings:
    """Check the settings of distillation: a teacher, and rewards that are read if they are shaped."""
    advantage = config.algorithm.advantage
    if not advantage.estimator.needs.teacher:
        return

    if config.teacher.path is None and not config.teachers:
        yield Finding(
            ("teacher.path", _ESTIMATOR),
            f"{advantage.estimator.name} needs a teacher, but the path is null; give the folder of a model "
            f"with the policy's tokenizer, or teachers of data sources in `teachers`",
        )
    yield from _source_teachers(config)

    reads_rewards = advantage.distillation.reward_weight != 0
    unread = "with reward_weight 0 the rewards are not read, so a penalty in them has no effect"
    yield from refusals(
        (
            ("rollout.n", _REWARD_WEIGHT),
            reads_rewards and config.rollout.n < 2,
            f"the rewards of the samples of a prompt are compared, but n is {config.rollout.n}, so they have "
            f"no effect; use 2 or more, or reward_weight 0",
        ),
        (
            (_WHERE, _REWARD_WEIGHT),
            not reads_rewards and config.algorithm.kl.in_reward,
            f"{unread}; use where=none or where=loss",
        ),
        (
            ("algorithm.overlong.buffer_share", _REWARD_WEIGHT),
            not reads_rewards and config.algorithm.overlong.buffer_share != 0,
            f"{unread}; use 0, or a reward_weight above 0",
        ),
        (
            ("data.columns.teacher_prompt", "agent"),
            config.data.columns.teacher_prompt is not None and config.agent.is_used,
            "the rows of an episode may continue other prompts than that of its data row, in whose place the "
            "teacher sees another; use teacher_prompt=null, or no agent",
        ),
    )


def _source_teachers(config: PPOConfig) -> Findings:
    """Check the teachers of data sources: their names, folders and data sources."""
    names: dict[str, int] = {}
    sources: dict[str, int] = {}
    for index, teacher in enumerate(config.teachers):
        key = f"teachers[{index}]"

        first = names.setdefault(teacher.name, index)
        yield from refusals(
            # Roles and timings are named after the teacher.
            (
                (f"{key}.name",),
                re.fullmatch(r"[A-Za-z0-9_]+", teacher.name) is None,
                f"is {teacher.name!r}, but is part of the role teacher_<name>; use letters, digits and '_'",
            ),
            (
                (f"{key}.name",),
                first != index,
                f"is {teacher.name!r}, the name of teachers[{first}]; use another",
            ),
            (
                (f"{key}.path",),
                teacher.path is None,
                "is null; give the folder of a model with the policy's tokenizer",
            ),
            (
                (f"{key}.data_sources",),
                not teacher.data_sources,
                "is empty, so the teacher would score nothing; list values of the column data_source, or use "
                "the section `teacher`, which scores all other samples",
            ),
        )
        for source in teacher.data_sources:
            if source in sources:
                yield Finding(
                    (f"{key}.data_sources",),
                    f"contains {source!r}, which teachers[{sources[source]}] scores; a sample has one "
                    f"teacher, so remove it from one of them",
                )
            sources.setdefault(source, index)


def critic(config: PPOConfig) -> Findings:
    warmup = config.trainer.critic_warmup_steps
    total = config.trainer.total_steps
    if warmup >= total:
        yield Finding(
            ("trainer.critic_warmup_steps", "trainer.total_steps"),
            f"critic_warmup_steps {warmup} leaves none of total_steps {total} to train the actor; use "
            f"{total - 1} or fewer",
        )


def policy_loss(config: PPOConfig) -> Findings:
    loss = config.algorithm.policy_loss
    trainer = config.trainer
    # Beginning with the second update, the policy differs from the one that generated the samples.
    updates = trainer.updates_per_step * trainer.epochs_per_batch
    needs = loss.kind.needs
    # Empty for a loss that is its paper's under any aggregation.
    of_paper = [each.name for each in needs.aggregations]
    covariance = loss.covariance

    yield from refusals(
        (
            (_KIND, "algorithm.policy_loss.aggregation"),
            bool(of_paper) and loss.aggregation.name not in of_paper,
            f"{loss.kind.name} requires the aggregation of its paper, {' or '.join(of_paper)}, but it is "
            f"{loss.aggregation.name}; use aggregation={''.join(of_paper[:1])}, or another kind",
        ),
        (
            (_KIND, "trainer.updates_per_step", "trainer.epochs_per_batch"),
            not needs.ratio and updates > 1,
            f"{loss.kind.name} has no ratio, so it is valid only for samples of the policy that is updated, "
            f"but a step makes {updates} updates; use updates_per_step=1 and epochs_per_batch=1, or another "
            "kind",
        ),
        (
            ("algorithm.policy_loss.covariance.low", "algorithm.policy_loss.covariance.high"),
            covariance.low >= covariance.high,
            f"no covariance is above {covariance.low:g} and below {covariance.high:g}; use a low below high",
        ),
    )


def aggregations(config: PPOConfig) -> Findings:
    """Check the aggregation of the policy loss and of the value loss."""
    for section, loss in (
        ("policy_loss", config.algorithm.policy_loss),
        ("value_loss", config.algorithm.value_loss),
    ):
        keys = (f"algorithm.{section}.norm_tokens", f"algorithm.{section}.aggregation")

        if loss.aggregation is Aggregation.sequence_mean_token_sum_norm and loss.norm_tokens is None:
            yield Finding(
                keys,
                f"{loss.aggregation.name} divides by the constant norm_tokens, which is null; use "
                f"data.max_response_length, {config.data.max_response_length}",
            )


def kl(config: PPOConfig) -> Findings:
    section = config.algorithm.kl
    if section.estimator in _STRAIGHT_THROUGH and section.where is KLWhere.reward:
        plain = section.estimator.name.removesuffix("_straight_through")
        yield Finding(
            ("algorithm.kl.estimator", _WHERE),
            f"{section.estimator.name} differs from {plain} only in its gradient, which a penalty in the "
            f"reward does not have; use {plain}, or where=loss",
        )


def rollout_correction(config: PPOConfig) -> Findings:
    correction = config.algorithm.rollout_correction
    if correction.low > correction.high:
        yield Finding(
            (f"{_CORRECTION}.low", f"{_CORRECTION}.high"),
            f"no weight is in [{correction.low:g}, {correction.high:g}]; use low <= high",
        )

    rejection = correction.rejection
    if rejection.low is not None and rejection.low > rejection.high:
        yield Finding(
            (f"{_CORRECTION}.rejection.low", f"{_CORRECTION}.rejection.high"),
            f"every response would be rejected: none is in [{rejection.low:g}, {rejection.high:g}]; use low "
            f"<= high",
        )

    if rejection.level is RejectionLevel.batch and rejection.estimator is RejectionEstimator.k1:
        yield Finding(
            (f"{_CORRECTION}.rejection.level", f"{_CORRECTION}.rejection.estimator"),
            "level batch drops the tokens with the largest estimates, but k1 is negative where the trainer's "
            "probability is the larger one; use estimator=k2 or k3",
        )

    kind = config.algorithm.policy_loss.kind
    if kind.needs.own_weights and correction.level is not CorrectionLevel.none:
        yield Finding(
            (f"{_CORRECTION}.level", _KIND),
            f"{kind.name} weighs responses by the ratio of their policies itself, so level "
            f"{correction.level.name} would count it twice; use level=none, and bypass=true for samples of "
            "older weights",
        )

    # With bypass the trainer computes no log-probs of the samples, so settings that read them are refused.
    if not correction.bypass:
        return
    yield from conflicts(
        f"{_CORRECTION}.bypass",
        "",
        (
            (f"{_CORRECTION}.level", f"{_CORRECTION}.rejection.estimator"),
            correction.enabled,
            "with bypass the old log-probs are the rollout engine's, so the ratio of the policy loss already "
            "is the importance weight; use level=none and rejection.estimator=none, or bypass=false",
        ),
        (
            (_WHERE,),
            config.algorithm.kl.in_reward,
            "the penalty in the reward needs the trainer's log-probs of the samples, which bypass does not "
            "compute; use where=loss, or bypass=false",
        ),
        (
            (_ESTIMATOR,),
            config.algorithm.reads_old_log_probs,
            f"{config.algorithm.advantage.estimator.name} needs the trainer's probabilities of the samples, "
            "which bypass does not compute; use another estimator, or bypass=false",
        ),
    )


def dynamic_sampling(config: PPOConfig) -> Findings:
    section = config.algorithm.dynamic_sampling
    kind = config.algorithm.advantage.estimator
    yield from refusals(
        (
            (f"{_DYNAMIC}.enabled", _ESTIMATOR),
            section.enabled and not kind.needs.compares_samples,
            f"drops prompts whose samples all score the same, but {kind.name} does not compare the samples "
            f"of a prompt and learns from such prompts too; use false, or an estimator such as grpo",
        ),
        (
            (f"{_DYNAMIC}.max_generations",),
            section.enabled and section.max_generations < 2,
            f"is {section.max_generations}, so the first dropped prompt could not be replaced and would end "
            f"the run; use 2 or more",
        ),
    )
