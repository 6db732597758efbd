"""The prompts of a run: parquet rows as verl users have them, rendered to token ids once, at the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.batch.data_proto import DataProto
from megarl.config.schema import Overlong
from megarl.data.fingerprint import Fingerprint
from megarl.data.overlong import Measured, keep_within
from megarl.data.padding import pad_left
from megarl.data.tables import DataError, DataRow, chat_messages, read_rows, typed_value
from megarl.data.tokenizer import render_chat

REQUIRED, OPTIONAL = ("prompt", "data_source", "reward_model"), ("extra_info",)  # columns
GROUND_TRUTH_EXAMPLE = "{'style': 'rule', 'ground_truth': '5'}"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    token_ids: tuple[int, ...]
    messages: list[dict[str, Any]]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]


class PromptDataset:
    """Columns: `prompt` (chat messages), `data_source` (str), `reward_model` ({style, ground_truth}), and `extra_info` (a dict),
    which may be absent. The chat is rendered by the tokenizer's template, opened for the assistant's answer.

    `num_filtered` counts the rows left out as too long. Raises DataError for a row that cannot be used.
    """

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_prompt_length: int, overlong: Overlong) -> None:
        self._pad_id = tokenizer.pad_token_id
        self._width = max_prompt_length
        prompts, measured = [], []
        for row in read_rows(files, required=REQUIRED, optional=OPTIONAL):
            prompt = read_prompt(row, tokenizer)
            prompts.append(prompt)
            measured.append(Measured.of(row, len(prompt.token_ids)))
        self._prompts = keep_within(prompts, measured, max_prompt_length, "data.max_prompt_length", overlong)
        self.num_filtered = len(prompts) - len(self._prompts)
        fingerprint = Fingerprint()
        for prompt in self._prompts:
            fingerprint.add(prompt.token_ids, values=[prompt.data_source, prompt.reward_model, prompt.extra_info])
        self.fingerprint = fingerprint.hex()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        """`prompts` and `prompt_attention_mask` (B, P) int64, left-padded to P = max_prompt_length, so that all batches join;
        arrays `uid`, `messages` (the chat that was rendered), `data_source`, `reward_model`, `extra_info`. Every row owns its dicts."""
        rows = [self._prompts[index] for index in indices]
        padded = pad_left([row.token_ids for row in rows], self._width, self._pad_id)
        return DataProto.from_dict(
            tensors={"prompts": padded.ids, "prompt_attention_mask": padded.mask},
            non_tensors={
                "uid": list(uids),
                "messages": [[dict(message) for message in row.messages] for row in rows],
                "data_source": [row.data_source for row in rows],
                "reward_model": [dict(row.reward_model) for row in rows],
                "extra_info": [dict(row.extra_info) for row in rows],
            },
        )


def read_prompt(row: DataRow, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """Of a row with the columns of PromptDataset. Raises DataError for one that cannot be used."""
    messages = chat_messages(row, "prompt")
    reward_model = typed_value(row, "reward_model", dict, GROUND_TRUTH_EXAMPLE)
    if "ground_truth" not in reward_model:
        raise row.error("reward_model", f"it has no 'ground_truth', only {sorted(reward_model)}; expected {GROUND_TRUTH_EXAMPLE}")
    extra_info = {} if row.values.get("extra_info") is None else typed_value(row, "extra_info", dict, "{'index': 0}")
    try:
        token_ids = render_chat(tokenizer, messages, for_generation=True)
    except ValueError as error:
        raise row.error("prompt", str(error)) from error
    if not token_ids:
        raise DataError(f"{row.file}, row {row.number}: the chat template renders the prompt to no token at all")
    return Prompt(
        token_ids=tuple(token_ids),
        messages=messages,
        data_source=typed_value(row, "data_source", str, "'openai/gsm8k'"),
        reward_model=reward_model,
        extra_info=extra_info,
    )
