"""The advantage estimators there are, and what each needs; their maths is in `megarl/algorithms/advantages`."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.kinds.kind import Kind


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    """What an estimator needs beside the rewards of a batch. The names of batch keys are those of `AdvantageInputs`."""

    compares_samples: bool  # with the others of their prompt: `rollout.n` is 2 or more, and equal scores teach nothing
    critic: bool = False  # `values`
    greedy_baseline: bool = False  # `baseline_scores`: a greedy response to each prompt, generated and scored besides
    score_parts: bool = False  # `score_parts`: each reward function's score, in place of the rewards and of the penalties in them
    old_log_probs: bool = False  # `old_log_probs`: the trainer's, of the samples, which are scored before the update for it
    sum_pi_squared: bool = False  # `sum_pi_squared`: of the trainer's probabilities; they come with `old_log_probs`


class AdvantageEstimator(Kind):
    needs: EstimatorNeeds

    gae = "gae", EstimatorNeeds(compares_samples=False, critic=True)  # with a critic
    grpo = "grpo", EstimatorNeeds(compares_samples=True)  # the group's mean and deviation
    grpo_pass_k = "grpo_pass_k", EstimatorNeeds(compares_samples=True)  # the best of the group against its second best
    rloo = "rloo", EstimatorNeeds(compares_samples=True)  # the mean of the group's other samples
    reinforce_plus_plus = "reinforce_plus_plus", EstimatorNeeds(compares_samples=False)  # whitened over the batch, no groups
    # the group's mean, whitened over the batch
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline", EstimatorNeeds(compares_samples=True)
    opo = "opo", EstimatorNeeds(compares_samples=True)  # the group's mean weighted by length
    gpg = "gpg", EstimatorNeeds(compares_samples=True)  # the group's mean, scaled for groups without signal
    remax = "remax", EstimatorNeeds(compares_samples=False, greedy_baseline=True)  # the score of a greedy response
    gdpo = "gdpo", EstimatorNeeds(compares_samples=True, score_parts=True)  # each reward function by itself, then added
    # a baseline for each token, by the gradient's squared norm
    optimal_token_baseline = "optimal_token_baseline", EstimatorNeeds(compares_samples=True, old_log_probs=True, sum_pi_squared=True)
