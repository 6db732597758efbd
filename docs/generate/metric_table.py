"""Every metric that a run can log, with its unit and description.

docs/tracking.md is generated from this table, and tests compare runs with it. In a pattern, `{mean,max}`
stands for each of these words, `<name>` for a name that depends on the run, and `[/<source>]` is optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class MetricRow(NamedTuple):
    """A row of the table. `unit` is empty for a number without a unit."""

    pattern: str
    unit: str
    meaning: str


_TOKENS = "over model-written tokens"
METRICS: Mapping[str, tuple[MetricRow, ...]] = {
    "Progress": (
        MetricRow("step", "", "Step number, starting at 1. Step 0 is the validation before training."),
        MetricRow("num_tokens", "tokens", "Prompt and response tokens of the step's batch."),
    ),
    "Rewards and advantages": (
        MetricRow(
            "reward/mean",
            "",
            "Mean score over samples. The same number as `critic/score/mean`.",
        ),
        MetricRow("critic/score/{mean,max,min}", "", "Score over samples."),
        MetricRow(
            "critic/rewards/{mean,max,min}",
            "",
            "Score minus KL penalty and other shaping, summed over the tokens of a sample, over samples.",
        ),
        MetricRow(
            "reward/<name>/{mean,max,min}",
            "",
            "Additional number `<name>` that reward functions return, over samples that have it.",
        ),
        MetricRow(
            "reward/functions/{mean,max,min}",
            "",
            "Weighted score of functions and judges, in runs with a reward model.",
        ),
        MetricRow("reward/judge/<name>/{mean,max,min}", "", "Score of the judge before weighting."),
        MetricRow("reward/judge/<name>/failed/mean", "share", "Samples for which the judge gave no score."),
        MetricRow(
            "reward/judge/<name>/latency_s/{mean,max,min}",
            "s",
            "Time from the first attempt at a request to the reply.",
        ),
        MetricRow("reward/model/{mean,max,min}", "", "Score of the reward model before weighting."),
        MetricRow(
            "reward/model/truncated",
            "share",
            "Conversations whose oldest tokens were truncated for the reward model.",
        ),
        MetricRow(
            "reward/model/spells_special",
            "share",
            "Responses whose text contains a special token of the reward model.",
        ),
        MetricRow("reward/error_rate", "share", "Samples whose scoring failed."),
        MetricRow(
            "reward/overlong_penalty",
            "",
            "Mean penalty for long responses (`algorithm.overlong`), at most 0.",
        ),
        MetricRow("reward/overlong_fraction", "share", "Samples with a penalty for their length."),
        MetricRow("critic/advantages/{mean,max,min,std}", "", f"Advantage A, {_TOKENS}."),
        MetricRow("critic/returns/{mean,max,min,std}", "", f"Return, the target of the critic, {_TOKENS}."),
        MetricRow(
            "critic/baseline/mean", "", "Mean score of the greedy samples that ReMax uses as baselines."
        ),
        MetricRow(
            "groups/without_signal",
            "share",
            "Prompts whose samples all have the same score, which makes group-relative advantages 0.",
        ),
        MetricRow(
            "groups/{at_best,at_worst}",
            "share",
            "Prompts whose samples all have the largest (or smallest) score of the batch.",
        ),
        MetricRow(
            "dynamic_sampling/num_generations",
            "",
            "Rounds of generation until enough prompts had samples with different scores; 1 with async "
            "rollout.",
        ),
        MetricRow(
            "dynamic_sampling/{num_prompts,num_without_signal,num_surplus}",
            "prompts",
            "Prompts that were sampled; dropped because all scores are the same; not needed.",
        ),
        MetricRow("dynamic_sampling/score_mean", "", "Mean score of all samples, including dropped ones."),
        MetricRow(
            "curriculum/seen",
            "share",
            "Prompts of the data with scores, before the step (`data.curriculum.kind: learnability`).",
        ),
        MetricRow(
            "curriculum/low_weight",
            "share",
            "Prompts with scores whose weight is at most a tenth of the mean: solved, or out of reach.",
        ),
        MetricRow("curriculum/score_mean", "", "Estimated score of the prompts with scores, mean over them."),
        MetricRow(
            "curriculum/effective_share",
            "share",
            "Prompts among which sampling is spread: 1 / (N * sum of squared probabilities); 1 is uniform.",
        ),
        MetricRow(
            "curriculum/<name>", "", "A number of your own sampler (`data.curriculum.sampler`) by its name."
        ),
    ),
    "Policy": (
        MetricRow(
            "actor/pg_loss", "", "Policy loss without entropy and KL terms, mean over the step's updates."
        ),
        MetricRow(
            "actor/entropy", "nats", f"Entropy of the policy's next-token distribution, mean {_TOKENS}."
        ),
        MetricRow("actor/grad_norm", "", "Norm of the gradient before clipping."),
        MetricRow("actor/lr", "", "Learning rate of the step."),
        MetricRow(
            "{actor,critic,sft,dpo,reward_model}/skipped_updates",
            "share",
            "Updates that were dropped because their loss or gradient was not finite, with "
            "`optim.on_nonfinite: skip`.",
        ),
        MetricRow(
            "actor/pg_clipfrac",
            "share",
            "Tokens whose ratio is clipped (or that the loss excludes).",
        ),
        MetricRow(
            "actor/pg_clipfrac_dual",
            "share",
            "Tokens that are clipped by the dual clip (`algorithm.policy_loss.clip_dual`).",
        ),
        MetricRow(
            "actor/off_policy_fraction",
            "share",
            "Tokens of responses without a loss because of `algorithm.policy_loss.off_policy_limit`.",
        ),
        MetricRow("actor/approx_kl", "nats", "Mean of log p_old - log p_new, an estimate of KL(old, new)."),
        MetricRow(
            "actor/{ratio_max,ratio_min}",
            "",
            "Largest and smallest p_new / p_old of a token. Both are 1 in the first update of a step.",
        ),
        MetricRow(
            "actor/kl_loss",
            "nats",
            "KL to the reference, by `algorithm.kl.estimator`, if it is part of the loss.",
        ),
        MetricRow(
            "actor/reward_kl_penalty",
            "nats",
            "Mean KL to the reference per token, if it is subtracted from the reward.",
        ),
        MetricRow(
            "actor/reward_kl_penalty_coeff",
            "",
            "Coefficient of the KL penalty in the reward, which an adaptive controller adjusts.",
        ),
        MetricRow(
            "distillation/reverse_kl/mean",
            "nats",
            f"Log-prob of the policy minus that of the teacher, mean {_TOKENS}: an estimate of the "
            "reverse KL, which distillation minimizes.",
        ),
        MetricRow(
            "actor/top_k_kl",
            "nats",
            "KL between policy and teacher over the teacher's most likely tokens and all others together "
            "(`algorithm.advantage.distillation.top_k`), before its coefficient.",
        ),
        MetricRow(
            "actor/top_k_mass",
            "share",
            f"Probability that the teacher gives its most likely tokens, mean {_TOKENS}.",
        ),
        MetricRow(
            "{actor,critic,sft}/moe/expert_share/max",
            "share",
            "Largest share of a layer's tokens that was routed to one expert.",
        ),
        MetricRow(
            "{actor,critic,sft}/moe/{aux_loss,z_loss}",
            "",
            "Load-balancing loss and router z-loss without their coefficients, mean over layers.",
        ),
        MetricRow(
            "{actor,sft}/moe/indexer_loss",
            "nats",
            "Divergence of the indexers of sparse attention from the attention, mean over tokens and layers.",
        ),
    ),
    "Critic": (
        MetricRow("critic/vf_loss", "", "Value loss, mean over the step's updates."),
        MetricRow("critic/vf_clipfrac", "share", "Tokens whose value is clipped."),
        MetricRow(
            "critic/vf_explained_var",
            "",
            "1 - Var(returns - values) / Var(returns) over tokens; 1 is a perfect critic.",
        ),
        MetricRow("critic/vpred_mean", "", "Mean predicted value in the updates."),
        MetricRow("critic/values/{mean,max,min,std}", "", f"Value before the updates, {_TOKENS}."),
        MetricRow("critic/{grad_norm,lr}", "", "As for the actor."),
    ),
    "Supervised fine-tuning": (
        MetricRow("sft/loss", "nats", "Negative log-likelihood of a trained token, mean over tokens."),
        MetricRow("sft/{grad_norm,lr}", "", "As for the actor."),
        MetricRow("val/loss", "nats", "The same loss on the validation data."),
    ),
    "Preferences": (
        MetricRow("dpo/loss", "", "Loss of direct preference optimization, mean over pairs."),
        MetricRow("dpo/accuracy", "share", "Pairs whose chosen answer has the higher reward."),
        MetricRow(
            "dpo/{margin,chosen_reward,rejected_reward}",
            "nats",
            "Reward of an answer, `loss.beta` times the log-ratio of policy and reference over its tokens; "
            "and the difference of a pair's rewards. Mean over pairs.",
        ),
        MetricRow(
            "dpo/{chosen_log_prob,rejected_log_prob}",
            "nats",
            "Log-prob of an answer by the policy, sum over its tokens, mean over pairs.",
        ),
        MetricRow("dpo/{grad_norm,lr}", "", "As for the actor."),
        MetricRow("reward_model/loss", "nats", "Bradley-Terry loss of a reward model, mean over pairs."),
        MetricRow("reward_model/accuracy", "share", "Pairs whose chosen answer has the higher score."),
        MetricRow(
            "reward_model/{margin,chosen_score,rejected_score}",
            "",
            "Score of an answer, and the difference of a pair's scores. Mean over pairs.",
        ),
        MetricRow("reward_model/{grad_norm,lr}", "", "As for the actor."),
        MetricRow("val/{accuracy,margin}", "", "Accuracy and margin on the validation pairs."),
        MetricRow(
            "val/{chosen,rejected}_{reward,log_prob,score}",
            "",
            "The same values on the validation pairs.",
        ),
    ),
    "Lengths": (
        MetricRow(
            "response_length/{mean,max,min}",
            "tokens",
            "Model-written tokens of a sample, over samples.",
        ),
        MetricRow("response_length/clip_ratio", "share", "Samples that reached `data.max_response_length`."),
        MetricRow("prompt_length/{mean,max,min}", "tokens", "Tokens of a prompt, over samples."),
    ),
    "Agents": (
        MetricRow("agent/turns/{mean,max,min}", "turns", "Turns of the model in an episode, over episodes."),
        MetricRow("agent/calls/mean", "calls", "Tool calls in an episode."),
        MetricRow("agent/tool_s/mean", "s", "Seconds that an episode spent in tools."),
        MetricRow(
            "agent/errors/<kind>",
            "share",
            "Calls that failed with this kind of error, of all calls. Kinds that did not occur are absent.",
        ),
        MetricRow(
            "agent/ended/<why>",
            "share",
            "Episodes that ended for this reason: done, length, turns and others. Reasons that did not "
            "occur are absent.",
        ),
        MetricRow(
            "agent/waiting_share",
            "share",
            "Time that finished episodes spent waiting for tools, as a share of their duration.",
        ),
        MetricRow(
            "agent/branches/mean",
            "rows",
            "Rows of the batch that the episode of an agent program becomes, with a harness.",
        ),
        MetricRow(
            "agent/failures/<kind>",
            "share",
            "Episodes whose agent program failed so: exit_code, raised, no_sandbox, sandbox_ended, "
            "timed_out, disconnected, no_turn, bad_reward or reported. Kinds that did not occur are absent.",
        ),
        MetricRow(
            "agent/metrics/<name>/{mean,max,min}",
            "",
            "A number that the environment of a hub gave for an episode in addition to its reward.",
        ),
        MetricRow("agent/num_restarts", "", "Restarts of environment processes in the run so far."),
    ),
    "Rollout": (
        MetricRow(
            "rollout/{num_restarts,num_resent}",
            "",
            "Replica restarts, and resent requests, since the last step.",
        ),
        MetricRow(
            "rollout/replica_<number>/tokens_per_s",
            "tokens/s",
            "Tokens generated by the replica, per second of generation.",
        ),
        MetricRow(
            "rollout/spec_accept_length",
            "tokens",
            "Tokens generated per forward pass in which the policy verified drafted tokens, with speculative "
            "decoding: about 1 if every draft is rejected.",
        ),
        MetricRow(
            "rollout/age/{mean,max}",
            "versions",
            "Staleness of a token: weight versions between the sampling and the trained weights.",
        ),
        MetricRow(
            "rollout/groups_ahead",
            "prompts",
            "Prompts in the async rollout buffer (`rollout.max_staleness`).",
        ),
        MetricRow(
            "rollout/num_given_up",
            "prompts",
            "Prompts that were dropped in the run so far because an engine could not complete them, if "
            "`rollout.max_error_rate` or `rollout.max_staleness` is above 0.",
        ),
        MetricRow(
            "rollout/late", "share", "Tokens that are masked out of the loss because they are too old."
        ),
        MetricRow(
            "training/rollout_log_probs_diff_{mean,max}",
            "nats",
            "Absolute difference between the engine's and the trainer's log-prob of a token.",
        ),
        MetricRow(
            "training/rollout_log_probs_diff_mean/{current,older}",
            "nats",
            "The same mean over tokens from the current weights, and from older ones.",
        ),
        MetricRow(
            "training/rollout_probs_diff_{mean,max}",
            "",
            "Absolute difference between the engine's and the trainer's probability of a token.",
        ),
        MetricRow(
            "rollout_correction/{kl_k1,kl,kl_reverse}",
            "nats",
            "With x = log p_trainer - log p_engine: mean of -x; of e^x - 1 - x; of x e^x - e^x + 1.",
        ),
        MetricRow(
            "rollout_correction/{chi_square_token,chi_square_sequence}",
            "",
            "Mean of e^(2x) - 1 over tokens; over responses with x summed.",
        ),
        MetricRow("rollout_correction/{ratio_max,ratio_min}", "", "Largest and smallest e^x of a token."),
        MetricRow("rollout_correction/weight_mean", "", "Mean importance weight of the correction."),
        MetricRow(
            "rollout_correction/effective_sample_size",
            "share",
            "(sum of weights)^2 / (number of weights x sum of squared weights); 1 if all are equal.",
        ),
        MetricRow(
            "rollout_correction/{fraction_truncated,fraction_masked}",
            "share",
            "Weights that the correction truncates or sets to 0.",
        ),
        MetricRow(
            "rollout_correction/fraction_rejected",
            "share",
            "Responses or tokens that the correction rejects.",
        ),
    ),
    "Validation": (
        MetricRow(
            "val[/<source>]/score/mean",
            "",
            "Mean score of a sample, mean over prompts; `<source>` is a data source.",
        ),
        MetricRow("val[/<source>]/best@<k>", "", "Expected best score of k samples of a prompt."),
        MetricRow(
            "val[/<source>]/pass@<k>",
            "share",
            "Probability that at least one of k samples reaches `reward.pass_score`.",
        ),
        MetricRow(
            "val[/<source>]/maj@<k>",
            "",
            "Expected score of the most frequent answer of k samples; needs rewards that return `answer`.",
        ),
        MetricRow("val[/<source>]/reward/error_rate", "share", "Samples whose scoring failed."),
        MetricRow(
            "val[/<source>]/reward/<name>/mean", "", "Number `<name>` of reward functions, mean over prompts."
        ),
        MetricRow("val[/<source>]/turns/mean", "turns", "Turns of the model in an episode."),
    ),
    "Weight sync": (
        MetricRow("resharding/seconds", "s", "Duration of the last weight sync."),
        MetricRow(
            "resharding/{packing_s,waiting_s}",
            "s",
            "Part of it spent copying into messages, and waiting for others, on the slowest trainer rank.",
        ),
        MetricRow("resharding/load_s", "s", "Time until the last engine had all weights."),
        MetricRow("resharding/verify_s", "s", "Time to compare checksums."),
        MetricRow("resharding/nbytes", "bytes", "Bytes sent by all trainer ranks together."),
        MetricRow(
            "resharding/sent_share",
            "",
            "nbytes divided by those of all weights, with `resharding.delta`. 1 or a little more: everything "
            "was sent, as in the first sync.",
        ),
        MetricRow("resharding/extra_bytes", "bytes", "Largest additional memory of a trainer rank."),
        MetricRow("resharding/gb_per_s", "GB/s", "nbytes divided by seconds without verify_s."),
    ),
    "Recovery": (
        MetricRow(
            "recovery/num_recoveries",
            "",
            "Times that lost trainer processes were restarted in the step, if `recovery.enabled`.",
        ),
        MetricRow(
            "recovery/lost_s",
            "s",
            "Time of interrupted attempts, and to restart, restore and repeat steps.",
        ),
    ),
    "Time, speed and memory": (
        MetricRow(
            "timing_s/<phase>",
            "s",
            "Duration of a phase: gen, reward, old_log_prob, update_actor and others; `step` is the whole "
            "step, `testing` validation.",
        ),
        MetricRow(
            "perf/predicted_step_s",
            "s",
            "Predicted duration of the step for its mean lengths, if placement.device_profile is set.",
        ),
        MetricRow(
            "predicted_s/<phase>", "s", "Predicted duration of a phase, to compare with timing_s/<phase>."
        ),
        MetricRow("perf/throughput", "tokens/s", "num_tokens divided by the step time without validation."),
        MetricRow(
            "perf/throughput_per_device", "tokens/s", "perf/throughput divided by the number of devices."
        ),
        MetricRow(
            "perf/tokens_per_s/<role>",
            "tokens/s",
            "Tokens that an update of the role trains on, per second and device.",
        ),
        MetricRow(
            "perf/computed_tokens_per_s/<role>",
            "tokens/s",
            "The same, counting prompts shared by samples of a micro-batch once.",
        ),
        MetricRow(
            "perf/tflops/<role>",
            "TFLOP/s",
            "Floating-point operations of these tokens, per second and device.",
        ),
        MetricRow(
            "perf/mfu/<role>",
            "share",
            "Model FLOPs utilization: perf/tflops divided by the device's peak, if known.",
        ),
        MetricRow(
            "perf/trainer_idle",
            "share",
            "Share of the step in which the trainer waited for samples, with async rollout.",
        ),
        MetricRow(
            "perf/engines_idle",
            "share",
            "Share of the time since the last step in which a replica had no request, mean over replicas.",
        ),
        MetricRow(
            "perf/slowest_rank_ratio/<role>",
            "",
            "Time of the slowest rank for the same small computation, divided by the median of its peers, "
            "median over the step's updates (`recovery.straggler_factor`).",
        ),
        MetricRow(
            "memory/<role>_rss_gb/{training,rollout}",
            "GiB",
            "Resident memory of the role's fullest process, in the training and in the generation phase of "
            "a step.",
        ),
    ),
}
