"""From a step's batch to the rows that are kept of it (tracking/samples.py)."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.algorithms.masked import masked_row_sums, row_lengths
from megarl.batch.data_proto import DataProto
from megarl.batch.token_rows import token_rows
from megarl.config.schema import PPOConfig
from megarl.data.tokenizer import decode_rows, load_tokenizer, token_texts
from megarl.tracking.samples import SCHEMA, SampleTable, list_column

_REWARD_MODEL = "reward_model"


class SampleRows:
    """Which steps are kept, and their rows. A row's lists are of its response's real tokens, in their order."""

    def __init__(self, config: PPOConfig) -> None:
        self._model, self._tracking, self._last_step = config.model, config.tracking, config.trainer.total_steps
        self._parts = [function.name for function in config.reward.functions]
        if config.reward.model.path is not None:
            self._parts.append(_REWARD_MODEL)
        self._own_log_probs = not config.algorithm.rollout_correction.bypass

    @property
    def max_bytes(self) -> int:
        return int(self._tracking.samples_max_gb * 2**30)

    def is_due(self, step: int) -> bool:
        """The first step, each `tracking.samples_every_steps`-th, and the last."""
        every = self._tracking.samples_every_steps
        return every > 0 and (step % every == 0 or step in (1, self._last_step))

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._model.path, self._model.trust_remote_code)

    def table(self, batch: DataProto, step: int) -> SampleTable:
        """`batch`: as the loss sees it, with scores and advantages. `log_probs` is null where the trainer computed none of its own."""
        own = ["old_log_probs"] if self._own_log_probs else []
        rows = token_rows(batch.columns, ["advantages", "rollout_log_probs", *own])
        arrays, mask = batch.non_tensor_batch, rows["response_mask"]
        lengths, prompt_lengths = row_lengths(mask).tolist(), rows["prompts"].lengths.tolist()
        is_real = mask.flat()

        def of_tokens(name: str, kind: pa.DataType) -> pa.Array:
            return list_column(lengths, rows[name].flat()[is_real].numpy(), kind)

        advantages = masked_row_sums(rows["advantages"], mask) / row_lengths(mask).clamp(min=1)
        parts = batch.tensors["score_parts"]
        prompt_ids = rows["prompts"].flat().numpy()
        columns: dict[str, Any] = {
            "step": [step] * len(batch),
            "uid": [str(uid) for uid in arrays["uid"]],
            "data_source": arrays["data_source"].tolist(),
            "prompt": self._prompts(prompt_ids, prompt_lengths),
            "prompt_ids": list_column(prompt_lengths, prompt_ids, pa.int32()),
            "response": decode_rows(self._tokenizer, rows["responses"], mask),
            "response_ids": of_tokens("responses", pa.int32()),
            "ground_truth": [_text(model["ground_truth"]) for model in arrays["reward_model"]],
            "score": [float(score) for score in arrays["score"]],
            "score_parts": list_column([parts.shape[1]] * len(batch), parts.flatten().numpy(), pa.float32()),
            "advantage": advantages.numpy(),
            "advantages": of_tokens("advantages", pa.float32()),
            "log_probs": of_tokens("old_log_probs", pa.float32()) if self._own_log_probs else pa.nulls(len(batch)),
            "rollout_log_probs": of_tokens("rollout_log_probs", pa.float32()),
            "weight_version": arrays["weight_version"].tolist(),
            "prompt_length": prompt_lengths,
            "response_length": lengths,
            "finish_reason": arrays["finish_reason"].tolist(),
        }
        table = pa.table({name: pa.array(column, SCHEMA.field(name).type) for name, column in columns.items()}, SCHEMA)
        ids = np.unique(rows["responses"].flat()[is_real].numpy()).tolist()
        return SampleTable(table, token_texts(self._tokenizer, ids), self._parts)

    def _prompts(self, ids: np.ndarray, lengths: list[int]) -> list[str]:
        """With the template's special tokens; the samples of a prompt stand together, so that each is decoded once."""
        texts: list[str] = []
        before = None
        for row in np.split(ids, np.cumsum(lengths)[:-1]):
            if before is None or not np.array_equal(row, before):
                text = str(self._tokenizer.decode(row, skip_special_tokens=False))
            before = row
            texts.append(text)
        return texts


def _text(ground_truth: Any) -> str:
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False, default=str)
