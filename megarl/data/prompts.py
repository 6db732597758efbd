"""The prompts of a run: rows with the columns that users of verl have, or others, rendered to token ids once, at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import DataConfig, PromptColumnsConfig
from megarl.data.files import DataError
from megarl.data.tables import (
    DataRow,
    Fingerprint,
    Measured,
    RowIdentity,
    chat_messages,
    keep_within,
    read_rows,
    typed_value,
    warn_of_escapes,
)
from megarl.data.tokenizer import Tools
from megarl.data.whole_chat import render_whole, rendering_identity, spelled_special

GROUND_TRUTH_EXAMPLE = "{'style': 'rule', 'ground_truth': '5'}"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    token_ids: tuple[int, ...]
    messages: list[dict[str, Any]]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]


class PromptDataset:
    """The rows of `files`, read as `data` says: `prompt` (chat messages, or a text), `data_source` (str), `reward_model`
    ({style, ground_truth}), and `extra_info` (a dict), which may be absent, each in the column that `data.columns` names. The chat is
    rendered by the tokenizer's template, with the `tools` that the model is told of, opened for the assistant's answer.

    `num_filtered` counts the rows left out as too long. Raises DataError for a row that cannot be used.
    """

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: DataConfig, tools: Tools = None) -> None:
        self._pad_id = tokenizer.pad_token_id
        prompts, measured = [], []
        for row in read_prompt_rows(files, data.columns):
            prompt = read_prompt(row, tokenizer, data, tools)
            prompts.append(prompt)
            measured.append(Measured.of(row, len(prompt.token_ids)))
        warn_of_escapes([spelled_special(tokenizer, prompt.messages) for prompt in prompts])
        kept = keep_within(range(len(prompts)), measured, data.max_prompt_length, "data.max_prompt_length", data.overlong)
        self._prompts = [prompts[index] for index in kept]
        self.row_files = [measured[index].file for index in kept]
        self.num_filtered = len(prompts) - len(self._prompts)
        self.identity = self._identity(tokenizer)

    def _identity(self, tokenizer: PreTrainedTokenizerBase) -> RowIdentity:
        rows, tokens = Fingerprint(), Fingerprint()
        for prompt in self._prompts:
            values = [prompt.data_source, prompt.reward_model, prompt.extra_info]
            rows.add(values=[prompt.messages, *values])
            tokens.add(prompt.token_ids, values=values)
        return RowIdentity(rows.hex(), *rendering_identity(tokenizer, tokens))

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        """`prompts`, rows of tokens, which are padded on the left; arrays `uid`, `messages` (the chat that was rendered), `data_source`,
        `reward_model`, `extra_info`. Every row owns its dicts."""
        rows = [self._prompts[index] for index in indices]
        prompts = RaggedTensor.of_rows([row.token_ids for row in rows], torch.int32, padding=self._pad_id, on_left=True)
        return DataProto.from_dict(
            tensors={"prompts": prompts},
            non_tensors={
                "uid": list(uids),
                "messages": [[dict(message) for message in row.messages] for row in rows],
                "data_source": [row.data_source for row in rows],
                "reward_model": [dict(row.reward_model) for row in rows],
                "extra_info": [dict(row.extra_info) for row in rows],
            },
        )


def read_prompt_rows(files: Sequence[str], columns: PromptColumnsConfig) -> Iterator[DataRow]:
    """With the columns of PromptDataset. Raises DataError, see `read_rows`."""
    answers = columns.reward_model if columns.ground_truth is None else columns.ground_truth
    required = [name for name in (columns.prompt, columns.data_source, answers) if name is not None]
    optional = [columns.extra_info]
    if columns.extra_info != PromptColumnsConfig().extra_info:  # who names a column has one
        required, optional = [*required, *optional], []
    example = "data.columns.prompt=question data.columns.ground_truth=answer data.columns.data_source=null"
    hint = f"; data.columns says which columns are read, such as {example}"
    return read_rows(files, required, optional, hint)


def read_prompt(row: DataRow, tokenizer: PreTrainedTokenizerBase, data: DataConfig, tools: Tools = None) -> Prompt:
    """Of a row of `read_prompt_rows`; tools: that the model is told of. Raises DataError for one that cannot be used."""
    columns = data.columns
    messages = chat_messages(row, columns.prompt, data.system_prompt)
    if messages[-1]["role"] == "assistant":
        problem = "the last message is the assistant's, and the answer to it would be a second one"
        raise row.error(columns.prompt, f"{problem}; end the prompt with what is to be answered")
    if columns.ground_truth is None:
        reward_model = typed_value(row, columns.reward_model, dict, GROUND_TRUTH_EXAMPLE)
        if "ground_truth" not in reward_model:
            problem = f"it has no 'ground_truth', only {sorted(reward_model)}; expected {GROUND_TRUTH_EXAMPLE}"
            raise row.error(columns.reward_model, problem)
    else:
        reward_model = {"style": "rule", "ground_truth": row.values[columns.ground_truth]}
    extra_info = {} if row.values.get(columns.extra_info) is None else typed_value(row, columns.extra_info, dict, "{'index': 0}")
    source = Path(row.file).stem
    if columns.data_source is not None:
        source = typed_value(row, columns.data_source, str, "'openai/gsm8k'")
        if not source.strip() or not source.isprintable():
            problem = f"is {source!r}, but names the kind of task in metrics such as val/<data_source>/score/mean"
            raise row.error(columns.data_source, f"{problem}; give it a name, or set data.columns.data_source=null for the file's")
    try:
        token_ids = render_whole(tokenizer, messages, data.lossy, for_generation=True, tools=tools)
    except ValueError as error:
        raise row.error(columns.prompt, str(error)) from error
    if not token_ids:
        raise DataError(f"{row.file}, row {row.number}: the chat template renders the prompt to no token at all")
    return Prompt(token_ids=tuple(token_ids), messages=messages, data_source=source, reward_model=reward_model, extra_info=extra_info)
