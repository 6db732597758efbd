"""Metrics of a step's samples, the rows of its sample file, and the batches that `megarl replay` reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from megarl.algorithms.groups import group_metrics
from megarl.algorithms.losses import policy_terms
from megarl.algorithms.masked import masked_mean, masked_row_sums, row_lengths
from megarl.algorithms.metrics import (
    age_metrics,
    agent_metrics,
    data_metrics,
    reward_model_metrics,
    reward_number_metrics,
)
from megarl.algorithms.rollout_correction import correct
from megarl.batch.branches import EPISODE_TOKENS, episode_tokens, merge_branches
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.roles import scores_in_update
from megarl.config.schema import Aggregation, CorrectionLevel, Late, PolicyLossKind, PPOConfig
from megarl.data.tokenizer import decode_rows, load_tokenizer, token_texts
from megarl.machine.strict_json import dump_readable
from megarl.roles.models import LOSS_MASK, POLICY_LOG_PROBS, valid_token_count
from megarl.tracking.run_files import writing
from megarl.tracking.samples import (
    LATE,
    OF_EPISODES,
    OFF_POLICY,
    REJECTED,
    SCHEMA,
    SampleTable,
    list_column,
)
from megarl.trainers.advantages import AdvantageStep, Metrics
from megarl.trainers.monitor import Monitor

_REWARD_MODEL = "reward_model"
_MAX_BYTES = 4 * 2**30  # of all files of samples


class SampleRows:
    """Selects the steps to store, and builds their rows.

    The lists of a row cover the real tokens of its response, in order. For an episode they include tokens
    that the model did not write.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._model = config.model
        self._tracking = config.tracking
        self._last_step = config.trainer.total_steps
        reward = config.reward
        self._parts = [part.name for part in (*reward.functions, *reward.judges)]
        if reward.model.path is not None:
            self._parts.append(_REWARD_MODEL)
        self._algorithm = config.algorithm
        self._masks_late = config.rollout.late is Late.mask
        self._max_age = config.rollout.max_staleness
        self._own_log_probs = not config.algorithm.rollout_correction.bypass

    def record(self, batch: DataProto, step: int, monitor: Monitor) -> None:
        """Store the samples of the first step, every `tracking.samples_every_steps`-th, and the last.

        The rows are made and written in the background, so the batch must not change any more.
        """
        every = self._tracking.samples_every_steps
        if every > 0 and (step % every == 0 or step in (1, self._last_step)):
            monitor.record_samples(step, lambda: self.table(batch, step), _MAX_BYTES)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._model.path, self._model.trust_remote_code)

    def table(self, batch: DataProto, step: int) -> SampleTable:
        """Build the table of a step.

        Args:
            batch: The batch as the loss receives it, with scores and advantages. `log_probs` is null if the
                trainer computed no log-probs itself.
        """
        # Keep the tokens that the model wrote, and for episodes those of the environment as well.
        arrays = batch.non_tensor_batch
        are_episodes = "num_turns" in batch.non_tensor_batch
        rows = batch.ragged
        mask = rows["response_mask"]
        kept = RaggedTensor.constant(True, mask.lengths, torch.bool) if are_episodes else mask
        lengths = row_lengths(kept).tolist()
        prompt_lengths = rows["prompts"].lengths.tolist()
        is_real = kept.flat()

        def of_tokens(values: torch.Tensor, kind: pa.DataType) -> pa.Array:
            return list_column(lengths, values[is_real].numpy(), kind)

        def of_model(name: str, column: RaggedTensor | None) -> pa.Array:
            if column is None:
                return nothing
            # Values at positions that the environment wrote are meaningless.
            return of_tokens(torch.where(mask.flat(), column.flat(), 0), SCHEMA.field(name).type.value_type)

        advantages = masked_row_sums(rows["advantages"], mask) / row_lengths(mask).clamp(min=1)
        prompt_ids = rows["prompts"].flat().numpy()
        nothing = pa.nulls(len(batch))
        columns: dict[str, Any] = {
            **_of_rows(batch, step),
            "prompt": self._prompts(prompt_ids, prompt_lengths),
            "prompt_ids": list_column(prompt_lengths, prompt_ids, pa.int32()),
            "response": decode_rows(
                self._tokenizer, rows["responses"], rows["answer_mask"] if are_episodes else mask
            ),
            "response_ids": of_tokens(rows["responses"].flat(), pa.int32()),
            "advantage": advantages.numpy(),
            **{name: of_model(name, column) for name, column in self._of_tokens(batch).items()},
            "prompt_length": prompt_lengths,
            "response_length": lengths,
            **(
                _of_episodes(arrays, lengths, mask, rows["environment_rewards"])
                if are_episodes
                else dict.fromkeys(OF_EPISODES, nothing)
            ),
        }

        # All runs share one schema; columns that a run does not have are null.
        table = pa.table(
            {name: pa.array(column, SCHEMA.field(name).type) for name, column in columns.items()}, SCHEMA
        )

        # Store the text of each token that occurs, so that readers need no tokenizer.
        ids = np.unique(rows["responses"].flat()[is_real].numpy()).tolist()

        return SampleTable(table, token_texts(self._tokenizer, ids), self._parts)

    def _of_tokens(self, batch: DataProto) -> dict[str, RaggedTensor | None]:
        """Return the columns with a value for each token that the model wrote; None if the run has none."""
        rows = batch.ragged
        weights = self._rollout_weights(rows)
        gradients, off_policy = self._gradients(rows, weights)
        return {
            "advantages": rows["advantages"],
            "log_probs": rows["old_log_probs"] if self._own_log_probs else None,
            "rollout_log_probs": rows["rollout_log_probs"],
            "rollout_weights": weights,
            "excluded": self._excluded(batch, off_policy),
            "loss_share": self._loss_share(batch, gradients),
        }

    def _rollout_weights(self, rows: Mapping[str, RaggedTensor]) -> RaggedTensor | None:
        """Return the weights of the rollout correction, which the update may have computed itself."""
        config = self._algorithm.rollout_correction
        if config.bypass or config.level is CorrectionLevel.none:
            return None
        if "rollout_weights" in rows:
            return rows["rollout_weights"]
        old, engine, mask = (rows[key] for key in ("old_log_probs", "rollout_log_probs", "response_mask"))
        return cast("RaggedTensor", correct(old, engine, mask, config).weights)

    def _gradients(
        self, rows: Mapping[str, RaggedTensor], weights: RaggedTensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of each token's policy loss by its log-prob, and what `off_policy_limit` drops.

        The policy is that before the step's first update. With bypass it is known if the step has a single
        update; otherwise the engine stands for it, so every ratio is 1. A function of the user's runs in the
        workers only, so the gradient is then that of GPG.
        """
        algorithm = self._algorithm
        if algorithm.policy_loss.function is not None:
            plain = replace(algorithm.policy_loss, function=None, kind=PolicyLossKind.gpg)
            algorithm = replace(algorithm, policy_loss=plain)
        old = rows["old_log_probs"]
        read = {
            "response_mask": rows.get(LOSS_MASK, rows["response_mask"]),
            "old_log_probs": old,
            "advantages": rows["advantages"],
            "rollout_log_probs": rows["rollout_log_probs"],
            **({} if weights is None else {"rollout_weights": weights}),
        }
        of_policy = rows.get(POLICY_LOG_PROBS, old)
        gradients = RaggedTensor.empty(old, old.dtype)
        left_out = RaggedTensor.empty(old, torch.bool)

        # No loss mixes rows, so they may be in any blocks.
        with torch.enable_grad():
            for numbers in old.blocks_of_like_length():
                block = {name: column[numbers] for name, column in read.items()}
                policy = of_policy[numbers].requires_grad_()
                terms = policy_terms(policy, block, algorithm)
                (gradient,) = torch.autograd.grad(terms.per_token.sum(), policy)
                gradients[numbers] = gradient
                left_out[numbers] = (
                    torch.zeros_like(block["response_mask"]) if terms.off_policy is None else terms.off_policy
                )
        return gradients.flat(), left_out.flat()

    def _excluded(self, batch: DataProto, off_policy: torch.Tensor) -> RaggedTensor | None:
        """Return what leaves each token out of the loss: 0 if nothing does, REJECTED, LATE or OFF_POLICY."""
        rows = batch.ragged
        if LOSS_MASK not in rows and self._algorithm.policy_loss.off_policy_limit is None:
            return None
        in_loss = rows.get(LOSS_MASK, rows["response_mask"])
        ages = batch.meta_info["weight_version"] - rows["token_versions"].flat()
        is_late = (ages > self._max_age) & self._masks_late
        by_rule = torch.where(is_late, LATE, REJECTED)
        excluded = torch.where(in_loss.flat(), torch.where(off_policy, OFF_POLICY, 0), by_rule)
        return RaggedTensor.packed_rows(excluded.to(torch.int8), in_loss.lengths)

    def _loss_share(self, batch: DataProto, gradients: torch.Tensor) -> RaggedTensor:
        """Return each token's share of the sum of |gradient| over the batch, as aggregated."""
        rows = batch.ragged
        in_loss = rows.get(LOSS_MASK, rows["response_mask"])
        sizes = gradients.abs()
        if self._algorithm.policy_loss.aggregation is Aggregation.sequence_mean_token_mean:
            of_rows = row_lengths(in_loss).repeat_interleave(in_loss.lengths)
            of_episodes = episode_tokens(batch, in_loss).get(EPISODE_TOKENS)
            sizes = sizes / (of_rows if of_episodes is None else of_episodes.flat()).clamp(min=1)
        total = sizes.sum(dtype=torch.float64).clamp(min=torch.finfo(torch.float32).tiny)
        return RaggedTensor.packed_rows(sizes / total, in_loss.lengths)

    def _prompts(self, ids: np.ndarray, lengths: list[int]) -> list[str]:
        """Decode the prompts with the special tokens of the chat template.

        Samples of a prompt are consecutive, so each prompt is decoded once.
        """
        texts: list[str] = []
        before = None
        text = ""

        for row in np.split(ids, np.cumsum(lengths)[:-1]):
            if before is None or not np.array_equal(row, before):
                text = str(self._tokenizer.decode(row, skip_special_tokens=False))
            before = row
            texts.append(text)

        return texts


def _of_rows(batch: DataProto, step: int) -> dict[str, Any]:
    """Return the columns with one value per row."""
    arrays = batch.non_tensor_batch
    parts = batch.tensors["score_parts"]

    return {
        "step": [step] * len(batch),
        "uid": [str(uid) for uid in arrays["uid"]],
        "data_source": arrays["data_source"].tolist(),
        "ground_truth": [_text(model["ground_truth"]) for model in arrays["reward_model"]],
        "score": [float(score) for score in arrays["score"]],
        "reward_numbers": [json.dumps(numbers) for numbers in arrays["reward_numbers"]]
        if "reward_numbers" in arrays
        else pa.nulls(len(batch)),
        # null: the function has no opinion on the sample
        "score_parts": list_column(
            [parts.shape[1]] * len(batch),
            [None if math.isnan(part) else part for part in parts.flatten().tolist()],
            pa.float32(),
        ),
        "weight_version": arrays["weight_version"].tolist(),
        "finish_reason": arrays["finish_reason"].tolist(),
    }


def _of_episodes(
    arrays: Mapping[str, np.ndarray], lengths: list[int], is_model: RaggedTensor, rewards: RaggedTensor
) -> dict[str, Any]:
    """Return the columns of episodes.

    Turns of the model are never adjacent: the environment's result is between two turns.
    """
    turn_rewards = []

    # The reward of a turn is on its last token.
    for wrote, of_tokens in zip(is_model.each(), rewards.each(), strict=True):
        is_end = wrote & ~torch.cat([wrote[1:], wrote.new_zeros(1)])
        turn_rewards.append(of_tokens[is_end].tolist())

    return {
        "is_model": list_column(lengths, is_model.flat().numpy(), pa.bool_()),
        "turn_rewards": turn_rewards,
        "num_calls": arrays["num_calls"].tolist(),
        "call_errors": [json.dumps(errors) for errors in arrays["call_errors"]],
        "episode_end": arrays["episode_end"].tolist(),
    }


def _text(ground_truth: Any) -> str:
    return ground_truth if isinstance(ground_truth, str) else dump_readable(ground_truth, default=str)


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


# ---- batches, with everything that the updates of trained models read


_FOLDER = "batches"
_NAME = re.compile(r"step_(\d{8,})\.batch")


class RecordedBatches:
    """Files of a run's newest batches, from which `megarl replay` repeats the updates of a step.

    Args:
        output_dir: The folder of the run.
        num_kept: The number of steps to keep; 0: none.
    """

    def __init__(self, output_dir: Path, num_kept: int) -> None:
        self._output_dir = output_dir
        self._folder = output_dir / _FOLDER
        self._num_kept = num_kept

    def record(self, step: int, batch: DataProto) -> None:
        """Write the batch of a step, and remove those of old steps and of steps that are repeated.

        Raises:
            RunError: The file cannot be written.
        """
        if not self._num_kept:
            return
        uid = [key for key in ("uid",) if key in batch.non_tensor_batch]
        with writing(self._output_dir):
            self._folder.mkdir(exist_ok=True)
            batch.select(None, uid, []).save_to_disk(self._folder / f"step_{step:08d}.batch")
            for other, path in self._files().items():
                if not step - self._num_kept < other <= step:
                    path.unlink()

    def read(self, step: int) -> DataProto:
        """Return the batch of a step.

        Raises:
            ValueError: The run did not keep it.
            SerializationError: The file is damaged.
        """
        files = self._files()
        if step not in files:
            kept = ", ".join(map(str, files)) or "none"
            raise ValueError(
                f"{self._folder}: has no batch of step {step} (steps kept: {kept}); a run keeps the batches "
                f"of its newest steps with tracking.record_batches=N"
            )
        return DataProto.load_from_disk(files[step])

    def _files(self) -> dict[int, Path]:
        found = {
            int(match[1]): path
            for path in self._folder.glob("step_*.batch")
            if (match := _NAME.fullmatch(path.name))
        }
        return dict(sorted(found.items()))
