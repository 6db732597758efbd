"""Metrics of the samples of a step, and of how far the policy has moved from the one that wrote them."""

from __future__ import annotations

import torch

from megarl.algorithms.groups import group_metrics
from megarl.algorithms.masked import masked_mean
from megarl.algorithms.metrics import (
    age_metrics,
    agent_metrics,
    data_metrics,
    reward_model_metrics,
    reward_number_metrics,
)
from megarl.algorithms.rollout_correction import correct
from megarl.batch.branches import merge_branches
from megarl.batch.data_proto import DataProto
from megarl.config.roles import scores_in_update
from megarl.config.schema import PPOConfig
from megarl.roles.models import valid_token_count
from megarl.trainers.advantages import AdvantageStep, Metrics


def batch_metrics(batch: DataProto, config: PPOConfig, advantages: AdvantageStep) -> Metrics:
    """Return the metrics of a step's samples.

    These are the metrics of data_metrics, age_metrics, group_metrics and reward_number_metrics, and

    - `actor/entropy`: mean entropy over response tokens, in nats, of the policy that wrote the samples,
      if the actor scored them;
    - `critic/baseline/mean`: mean score of the greedy responses, over samples.
    """
    # Metrics of the samples: lengths, ages, scores, groups. They count an episode of several rows once.
    num_tokens = float(valid_token_count(batch))
    prompts = batch.ragged["prompts"]
    batch = merge_branches(batch)
    columns = {**batch.columns, "prompts": prompts}
    arrays = batch.non_tensor_batch
    if config.algorithm.rollout_correction.bypass:
        # These are the engine's log-probs, so a comparison would be meaningless.
        del columns["old_log_probs"]
    metrics = data_metrics(columns, config.data.max_response_length)
    metrics |= age_metrics(columns, batch.meta_info["weight_version"])
    is_scored = batch.tensors.get("is_scored")  # a user's own loop may score the samples itself
    metrics |= group_metrics(
        torch.tensor([float(score) for score in arrays["score"]]), arrays["uid"], is_scored
    )
    metrics |= reward_number_metrics(arrays.get("reward_numbers", ()))
    if "entropys" in columns:
        metrics["actor/entropy"] = masked_mean(columns["entropys"], columns["response_mask"])
    if "baseline_scores" in columns:
        metrics["critic/baseline/mean"] = float(batch.tensors["baseline_scores"].mean())
    metrics["reward/error_rate"] = batch.meta_info["reward/error_rate"]
    metrics |= reward_model_metrics(batch.tensors)
    metrics |= agent_metrics(arrays)

    # The update scored the batch, so these metrics could not be computed before it.
    if "old_log_probs" in columns and scores_in_update(
        config.algorithm, one_update=config.trainer.one_update
    ):
        old, engine, mask = (columns[key] for key in ("old_log_probs", "rollout_log_probs", "response_mask"))
        metrics |= correct(old, engine, mask, config.algorithm.rollout_correction).metrics
        metrics |= advantages.kl_metrics(columns)
        metrics |= advantages.teacher_metrics(columns, mask)

    metrics["num_tokens"] = num_tokens
    return metrics
